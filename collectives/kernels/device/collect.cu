// Collect the marked entries, in the order of indices, after `remark` has marked by the k-th key.
//
// launch: any number of blocks; a block takes tiles of 32 * THREADS elements, strided: a word a
// thread. A tile without marks only costs a read of its tally.
//
//   bits      0100 | 0000 | 0011 | ...        thread 0, 1, 2
//   before       0      1      1              kept in threads and tiles before
//   kept      1, 8, 9, ...                    of keys equal to the k-th only the first `quota`
#include "tally.cuh"

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void collect(
    const Real* values_n, const Search* search, u64 tiles, const u32* bits, const Tally* tallies,
    const Tally* groups, Index* kept_indices_k, Real* kept_values_k) {
  typedef Keys<Real> K;
  const u64 floor = search->floor, quota = search->quota;
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (tallies[tile].above + tallies[tile].ties == 0) continue;
    const u64 word = tile * THREADS + threadIdx.x;
    const u32 marked = bits[word];
    u32 packed = 0, total;  // above: upper half, ties: lower half; a tile has up to 2^13
    for (u32 left = marked; left; left &= left - 1) {
      const u64 key = K::of(values_n[word * 32 + __ffs(left) - 1]);
      packed += key > floor ? 0x10000u : 1u;
    }
    packed = block_exclusive(packed, total);
    const Tally tile_before = before_tile(tallies, groups, tile);
    u64 above = tile_before.above + (packed >> 16), ties = tile_before.ties + (packed & 0xffffu);
    for (u32 left = marked; left; left &= left - 1) {
      const u64 at = word * 32 + __ffs(left) - 1;
      const Real value = values_n[at];
      const bool larger = K::of(value) > floor;
      if (larger || ties < quota) {
        const u64 to = above + at_most(ties, quota);
        kept_indices_k[to] = (Index)at;
        kept_values_k[to] = value;
      }
      larger ? ++above : ++ties;
    }
  }
}
