// Split a list into what the search keeps and the rest, both in order.
//
// launch: any number of blocks; a block takes tiles of THREADS entries, strided, as it was counted.
//
//   list     5  0  7  5  2  9      k = 3: floor 5, quota 1; a zero is no entry
//   kept     5     7        9      ties to the lower index
//   rest              5  2
#include "tally.cuh"

static_assert(THREADS <= 512, "three counts of a tile travel in ten bits each");

// rest_*: null where the rest is not wanted.
template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void split(
    const Index* list_indices_m, const Real* list_values_m, const Search* search,
    const Tally* tallies, const Tally* groups, Index* kept_indices_k, Real* kept_values_k,
    Index* rest_indices_m, Real* rest_values_m) {
  if (search->dense) return;  // there is no list
  const u64 floor = search->floor, quota = search->quota, listed = search->listed;
  const u64 tiles = (listed + THREADS - 1) / THREADS;
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u64 at = tile * THREADS + threadIdx.x;
    const Real value = at < listed ? list_values_m[at] : (Real)0;
    const u64 key = Keys<Real>::of(value);
    const bool larger = key > floor, equal = key && key == floor;
    u32 total;
    const u32 packed = block_exclusive((u32)larger << 20 | (u32)equal << 10 | (u32)(key > 0), total);
    const Tally tile_before = before_tile(tallies, groups, tile);
    const u64 above = tile_before.above + (packed >> 20);
    const u64 ties = tile_before.ties + (packed >> 10 & 1023u);
    const u64 kept = above + at_most(ties, quota);
    const u64 rest = tile_before.nonzero + (packed & 1023u) - kept;
    if (larger || (equal && ties < quota)) {
      kept_indices_k[kept] = list_indices_m[at];
      kept_values_k[kept] = value;
    } else if (key && rest_indices_m) {
      rest_indices_m[rest] = list_indices_m[at];
      rest_values_m[rest] = value;
    }
  }
}
