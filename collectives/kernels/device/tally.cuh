// Tallies: counts by tile, from which each tile learns where its entries go. Prefix sums are in two
// levels, so that none is long.
//
//   tiles     0    1    2  ...  THREADS-1 | THREADS ...      a tally for each
//   groups            0                   |    1    ...      the sum of THREADS tiles, then scanned
//
//   before(tile) = groups[of the tile] + the tiles of its group before it
#pragma once
#include "search.cuh"

// Store a tile's tally, and add it to its group's; called by one thread.
static __device__ void note(Tally* tallies, Tally* groups, u64 tile, const Tally& tally) {
  tallies[tile] = tally;
  Tally* group = groups + tile / THREADS;
  if (tally.above) atomicAdd(&group->above, tally.above);
  if (tally.ties) atomicAdd(&group->ties, tally.ties);
}

// Replace the groups' tallies by their exclusive prefix sums; return the sum of all.
static __device__ Tally scan_groups(Tally* groups, u64 tiles) {
  const u64 count = (tiles + THREADS - 1) / THREADS;
  Tally carry = {0, 0};
  for (u64 from = 0; from < count; from += THREADS) {
    const u64 at = from + threadIdx.x;
    Tally mine = {0, 0}, total;
    if (at < count) mine = groups[at];
    const Tally before = {block_exclusive(mine.above, total.above),
                          block_exclusive(mine.ties, total.ties)};
    if (at < count) groups[at] = Tally{carry.above + before.above, carry.ties + before.ties};
    carry = Tally{carry.above + total.above, carry.ties + total.ties};
  }
  return carry;
}

// The tally of everything before a tile; returned to every thread of the block.
static __device__ Tally before_tile(const Tally* tallies, const Tally* groups, u64 tile) {
  Tally mine = {0, 0};
  if (threadIdx.x < tile % THREADS) mine = tallies[tile - tile % THREADS + threadIdx.x];
  const Tally group = groups[tile / THREADS];
  return Tally{group.above + block_sum(mine.above), group.ties + block_sum(mine.ties)};
}

static __device__ u64 at_most(u64 count, u64 limit) { return count < limit ? count : limit; }
