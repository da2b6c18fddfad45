// Expand the bits to a list of (index, value) in the order of the indices, and find the k-th key.
//
// launch: any number of blocks; a block takes tiles of 32 * THREADS elements, strided: a word a
// thread. A tile without a bit costs the look at its tally.
//
//   bits      0100 | 0000 | 0011 | ...        thread 0, 1, 2
//   before       0      1      1              bits in threads and tiles before
//   list      1, 8, 9, ...                    indices; the values beside them
//
// The histogram of the marks has told the range that holds the k-th key. Keys above it are kept
// for sure and counted, tile by tile of the list; those in it are the contenders, which are noted.
// The last block to finish ranks the contenders, and knows where every kept entry goes.
#include "tally.cuh"

// Search among the contenders for the k-th key, and count those that are kept; for the last block.
// Too many contenders to note (most keys are alike, say): it looks at the whole list.
template <class Real>
__device__ void rank(
    Search* search, const Real* list_values_m, const u32* contenders, u32 most_contenders,
    Tally* list_tallies, Tally* list_groups) {
  typedef Keys<Real> K;
  __shared__ u32 bins[BINS];
  const u64 lo = search->lo, shift = search->shift, listed = search->listed;
  const bool noted = search->contenders <= most_contenders;
  const u64 count = search->exact ? 0 : noted ? (u64)search->contenders : listed;
  while (!search->exact) {
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
    __syncthreads();
#pragma unroll 4
    for (u64 i = threadIdx.x; i < count; i += THREADS) {
      const u64 key = K::of(list_values_m[noted ? contenders[i] : i]);
      if (in_range(key, search->lo, search->shift))
        atomicAdd(&bins[(u32)((key - search->lo) >> search->shift)], 1u);
    }
    __syncthreads();
    narrow(search, bins);
  }
  const u64 floor = search->floor, quota = search->quota;
#pragma unroll 4
  for (u64 i = threadIdx.x; i < count; i += THREADS) {
    const u64 at = noted ? contenders[i] : i;
    const u64 key = K::of(list_values_m[at]);
    if (!in_range(key, lo, shift)) continue;
    if (key > floor) atomicAdd(&list_tallies[at / THREADS].above, 1u);
    if (key == floor) atomicAdd(&list_tallies[at / THREADS].ties, 1u);
  }
  __threadfence();
  __syncthreads();

  Tally before = {0, 0, 0};
  for (u64 first = 0; first < listed; first += (u64)THREADS * THREADS) {
    const u64 tile = first / THREADS + threadIdx.x;
    const Tally mine = tile * THREADS < listed ? list_tallies[tile] : Tally{0, 0, 0};
    if (threadIdx.x == 0) list_groups[first / THREADS / THREADS] = before;
    before.above += block_sum(mine.above);
    before.ties += block_sum(mine.ties);
  }
  if (threadIdx.x == 0) conclude<Real>(search, before.above + at_most(before.ties, quota), listed);
}

// list_tallies: zero. contenders: the places in the list of the first most_contenders to come.
template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void expand(
    const Real* values_n, Search* search, u64 tiles, const u32* bits, const Tally* tallies,
    const Tally* groups, Index* list_indices_m, Real* list_values_m, u32* contenders,
    u32 most_contenders, Tally* list_tallies, Tally* list_groups) {
  typedef Keys<Real> K;
  if (search->dense) return;  // the marks were of no use
  const u64 lo = search->lo, shift = search->shift;
  const bool all = search->exact;  // fewer than k there are
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (tallies[tile].above == 0) continue;
    const u64 word = tile * THREADS + threadIdx.x;
    const u32 marked = bits[word];
    u32 total;
    const u32 before = block_exclusive((u32)__popc(marked), total);
    u64 to = before_tile(tallies, groups, tile).above + before;
    u32 sure = 0;  // of this thread, in the list's tile that it is in
    for (u32 left = marked; left; left &= left - 1, ++to) {
      const u64 at = word * 32 + __ffs(left) - 1;
      const Real value = values_n[at];
      const u64 key = K::of(value);
      list_indices_m[to] = (Index)at;
      list_values_m[to] = value;
      if (all || above_range(key, lo, shift)) {
        ++sure;
      } else if (in_range(key, lo, shift)) {
        const u32 number = atomicAdd(&search->contenders, 1u);
        if (number < most_contenders) contenders[number] = (u32)to;
      }
      if (sure && (!(left & (left - 1)) || (to + 1) % THREADS == 0)) {
        atomicAdd(&list_tallies[to / THREADS].above, sure);
        sure = 0;
      }
    }
  }
  if (last_block(&search->ticket))
    rank<Real>(
        search, list_values_m, contenders, most_contenders, list_tallies, list_groups);
}
