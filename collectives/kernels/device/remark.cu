// Mark anew, by the k-th key itself, after a bad guess.
//
// launch: any number of blocks; a block takes tiles of 32 * THREADS elements, strided.
//
//   tile     | warp 0: 32 words of 32 elements | warp 1 | ...
//   word     lane 0 .. lane 31, one element each; their ballot is the word
#include "tally.cuh"

template <class Real>
__global__ __launch_bounds__(THREADS) void remark(
    const Real* values_n, u64 n, Search* search, u32* bits, Tally* tallies, Tally* groups) {
  typedef Keys<Real> K;
  const u64 floor = search->floor;
  const bool with_ties = search->quota > 0;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const u64 tiles = (n + 32 * THREADS - 1) / (32 * THREADS);
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    u32 above = 0, ties = 0;
#pragma unroll 8
    for (u32 i = 0; i < 32; ++i) {
      const u64 word = tile * THREADS + warp * 32 + i, at = word * 32 + lane;
      const u64 key = at < n ? (u64)K::of(values_n[at]) : 0;
      const bool larger = key > floor, equal = with_ties && key == floor;
      const u32 marked = __ballot_sync(ALL_LANES, larger || equal);
      if (lane == 0) bits[word] = marked;
      above += larger;
      ties += equal;
    }
    const Tally tally = {block_sum(above), block_sum(ties)};
    if (threadIdx.x == 0) note(tallies, groups, tile, tally);
  }
  if (!last_block(&search->ticket)) return;
  scan_groups(groups, tiles);
  if (threadIdx.x == 0) conclude<Real>(search, search->listed);
}
