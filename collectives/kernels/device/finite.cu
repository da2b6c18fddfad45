// Set a flag if an element is NaN or infinite.
//
// launch: any number of blocks, THREADS * 4 elements each, strided. The flag must be 0 before.
#include "block.cuh"

template <class Element>
__global__ __launch_bounds__(THREADS) void find_nonfinite(
    const Element* array_n, u64 n, u32* flag) {
  typedef Keys<decltype(widened(Element()))> K;
  const bool all_aligned = aligned(array_n);
  bool found = false;
  for (u64 from = ((u64)blockIdx.x * THREADS + threadIdx.x) * 4; from < n;
       from += (u64)gridDim.x * THREADS * 4) {
    const Four<Element> four = load(array_n, from, n, all_aligned && from + 4 <= n);
#pragma unroll
    for (int j = 0; j < 4; ++j) found |= K::of(widened(four.at[j])) >= K::INFINITE;
  }
  if (__syncthreads_or(found) && threadIdx.x == 0) *flag = 1;  // no race: all write 1
}
