// Copy, in order, the entries that the search keeps of a list.
//
// launch: any number of blocks; a block takes tiles of THREADS entries, strided, the same tiles that
// were counted.
//
//   list     5  0  7  5  2  9      k = 3: floor 5, quota 1; zeros are never kept
//   kept     5     7        9      ties to the lower index
#include "tally.cuh"

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void split(
    const Index* list_indices_m, const Real* list_values_m, const Search* search,
    const Tally* tallies, const Tally* groups, Index* kept_indices_k, Real* kept_values_k) {
  if (search->dense) return;  // there is no list
  const u64 floor = search->floor, quota = search->quota, listed = search->listed;
  const u64 tiles = (listed + THREADS - 1) / THREADS;
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u64 at = tile * THREADS + threadIdx.x;
    const Real value = at < listed ? list_values_m[at] : (Real)0;
    const u64 key = Keys<Real>::of(value);
    const bool larger = key > floor, equal = key && key == floor;
    u32 total;  // two counts in one word, for a single scan
    const u32 packed = block_exclusive((u32)larger << 16 | (u32)equal, total);
    const Tally tile_before = before_tile(tallies, groups, tile);
    const u64 above = tile_before.above + (packed >> 16);
    const u64 ties = tile_before.ties + (packed & 0xffffu);
    const u64 kept = above + at_most(ties, quota);
    if (larger || (equal && ties < quota)) {
      kept_indices_k[kept] = list_indices_m[at];
      kept_values_k[kept] = value;
    }
  }
}
