// Count, for each tile of a list, what the search keeps; the last block writes the outcome.
//
// launch: any number of blocks; a block takes tiles of THREADS entries, strided. Zeros do not count
// (`sum_runs` leaves them in place of addends).
#include "tally.cuh"

template <class Real>
__global__ __launch_bounds__(THREADS) void count(
    const Real* list_values_m, Search* search, Tally* tallies, Tally* groups) {
  const u64 floor = search->floor, quota = search->quota, listed = search->listed;
  const u64 tiles = (listed + THREADS - 1) / THREADS;
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u64 at = tile * THREADS + threadIdx.x;
    const u64 key = at < listed ? (u64)Keys<Real>::of(list_values_m[at]) : 0;
    const Tally tally = {(u32)__syncthreads_count(key > floor),
                         (u32)__syncthreads_count(key && key == floor)};
    if (threadIdx.x == 0) note(tallies, groups, tile, tally);
  }
  if (!last_block(&search->ticket)) return;
  const Tally total = scan_groups(groups, tiles);
  if (threadIdx.x) return;
  conclude<Real>(search, total.above + at_most(total.ties, quota));
}
