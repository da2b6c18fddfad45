// Expand the bits to a list of (index, value) in the order of indices, and find the k-th key.
//
// launch: any number of blocks; a warp takes tiles of 32 * THREADS elements, strided: WARPS words a
// lane. A tile's marks are few and unevenly spread, so they are redistributed over the lanes first.
//
//   bits      0100 0000 | 0000 0000 | 0011 ...     lane 0, 1, 2
//   before            0 |         1 |    1         bits in lanes and tiles before
//   places    1, 16, 17, ...                       in shared memory; each lane then takes one
//   list      1, 16, 17, ...                       indices; the values beside them
//
// The histogram of the marks has given a range that contains the k-th key. Keys above it are certain
// to be kept, and are counted by tile of the list. Keys in it are the contenders; their positions
// are noted. The last block to finish ranks these, and computes where every kept entry goes.
#include "tally.cuh"

// Search the contenders for the k-th key, and count those that are kept; called by the last block.
// If there were too many to note, as when most keys are equal, it searches the whole list.
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

  Tally before = {0, 0};
  for (u64 first = 0; first < listed; first += (u64)THREADS * THREADS) {
    const u64 tile = first / THREADS + threadIdx.x;
    const Tally mine = tile * THREADS < listed ? list_tallies[tile] : Tally{0, 0};
    if (threadIdx.x == 0) list_groups[first / THREADS / THREADS] = before;
    before.above += block_sum(mine.above);
    before.ties += block_sum(mine.ties);
  }
  if (threadIdx.x == 0) conclude<Real>(search, before.above + at_most(before.ties, quota));
}

// So many marks of a tile are redistributed over a warp's lanes at a time.
constexpr u32 ROOM = 128;

// list_tallies: must be zero. contenders: gets positions in the list, of the first most_contenders.
template <class Real, class Index>
__global__ __launch_bounds__(THREADS, 4) void expand(
    const Real* values_n, Search* search, u64 tiles, const u32* bits, const Tally* tallies,
    const Tally* groups, Index* list_indices_m, Real* list_values_m, u32* contenders,
    u32 most_contenders, Tally* list_tallies, Tally* list_groups) {
  typedef Keys<Real> K;
  static_assert(32 * THREADS <= 1 << 16, "a place in a tile has 16 bits");
  __shared__ unsigned short places[WARPS][ROOM];
  if (search->dense) return;  // the guess was bad
  const u64 lo = search->lo, shift = search->shift;
  const bool all = search->exact;  // there are fewer than k
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (u64 tile = (u64)blockIdx.x * WARPS + warp; tile < tiles; tile += (u64)gridDim.x * WARPS) {
    u32 words[WARPS], marked = 0;
#pragma unroll
    for (u32 at = 0; at < WARPS; ++at) words[at] = bits[tile * THREADS + lane * WARPS + at];
#pragma unroll
    for (u32 at = 0; at < WARPS; ++at) marked += (u32)__popc(words[at]);
    const u32 through = warp_inclusive(marked);
    const u32 total = __shfl_sync(ALL_LANES, through, 31);
    if (!total) continue;
    u32 earlier = 0;  // marks in the tiles of its group before it
#pragma unroll
    for (u32 at = lane; at < THREADS; at += 32)
      if (at < tile % THREADS) earlier += tallies[tile - tile % THREADS + at].above;
    const u64 before = groups[tile / THREADS].above + warp_sum(earlier);

    u32 mine = through - marked;  // this lane's next mark, as a number within the tile
    for (u32 base = 0; base < total; base += ROOM) {
      __syncwarp();  // all lanes have read the places of the last round
#pragma unroll
      for (u32 at = 0; at < WARPS; ++at)
        for (; words[at] && mine < base + ROOM; words[at] &= words[at] - 1, ++mine)
          places[warp][mine - base] =
              (unsigned short)((lane * WARPS + at) * 32 + __ffs(words[at]) - 1);
      __syncwarp();
      for (u32 from = base; from < total && from < base + ROOM; from += 32) {
        const u32 number = from + lane;
        const u64 to = before + number;
        bool sure = false, contends = false;
        if (number < total) {
          const u64 at = tile * THREADS * 32 + places[warp][number - base];
          const Real value = values_n[at];
          const u64 key = K::of(value);
          list_indices_m[to] = (Index)at;
          list_values_m[to] = value;
          sure = all || above_range(key, lo, shift);
          contends = !sure && in_range(key, lo, shift);
        }
        // These 32 entries may span two tiles of the list.
        const u64 first = before + from;
        const u32 sures = __ballot_sync(ALL_LANES, sure);
        const u32 here = THREADS - (u32)(first % THREADS);
        const u32 of_this = here < 32 ? (1u << here) - 1 : ALL_LANES;
        if (lane == 0 && (sures & of_this))
          atomicAdd(&list_tallies[first / THREADS].above, (u32)__popc(sures & of_this));
        if (lane == 0 && (sures & ~of_this))
          atomicAdd(&list_tallies[first / THREADS + 1].above, (u32)__popc(sures & ~of_this));
        const u32 contending = __ballot_sync(ALL_LANES, contends);
        if (!contending) continue;
        u32 noted = 0;
        if (lane == 0) noted = atomicAdd(&search->contenders, (u32)__popc(contending));
        noted = __shfl_sync(ALL_LANES, noted, 0) + (u32)__popc(contending & ((1u << lane) - 1));
        if (contends && noted < most_contenders) contenders[noted] = (u32)to;
      }
    }
  }
  if (last_block(&search->ticket))
    rank<Real>(
        search, list_values_m, contenders, most_contenders, list_tallies, list_groups);
}
