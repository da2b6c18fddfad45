// Narrow the search by one level: a histogram of the keys in the range, then the bin of the k-th.
//
// launch: any number of blocks, THREADS * 4 elements each, strided. Does nothing if the k-th key is
// known already.
//
//   values  --->  bins of each block, in shared memory  --->  histogram  --->  last block: narrow
#include "search.cuh"

// over_list: the values are a list of `listed` candidates, not the dense vector.
template <class Real>
__global__ __launch_bounds__(THREADS, 4) void search_level(
    const Real* values_n, u64 n, Search* search, u32* histogram, u32 over_list) {
  typedef Keys<Real> K;
  typedef typename K::Key Key;
  if (search->exact) return;
  __shared__ u32 bins[BINS];
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
  __syncthreads();

  const Key lo = (Key)search->lo;
  const int shift = (int)search->shift;
  const u64 count = over_list ? search->listed : n;
  const bool all_aligned = aligned(values_n);
  for (u64 from = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4; from < count;
       from += (u64)gridDim.x * THREADS * 4) {
    const Four<Real> four = load(values_n, from, count, all_aligned && from + 4 <= count);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Key key = K::of(four.at[j]);
      if (from + j < count && key >= lo && (key - lo) >> shift < BINS)
        atomicAdd(&bins[(u32)((key - lo) >> shift)], 1u);
    }
  }

  __syncthreads();
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS)
    if (bins[bin]) atomicAdd(&histogram[bin], bins[bin]);
  if (last_block(&search->ticket)) narrow(search, histogram);
}
