// Begin a search: set the request, and clear histogram and tallies.
//
// launch: 1 block.
#include "tally.cuh"

// k:       how many to keep
// entries: of the list to search; 0 if a dense vector is to be marked first
// request: null for a list, which is searched without a guess
template <class Real>
__global__ __launch_bounds__(THREADS) void begin(
    Search* search, u32* histogram, Tally* groups, u32 group_count, u64 k, u64 capacity,
    u64 entries, const Request* request) {
  typedef Keys<Real> K;
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
  for (u32 group = threadIdx.x; group < group_count; group += THREADS)
    groups[group] = Tally{0, 0};
  if (threadIdx.x) return;
  const double guess = request ? request->guess : 0;
  const u64 key = guess == guess ? (guess > 0 ? (u64)K::of(narrowed<Real>(guess)) : 0) : search->next;
  Search fresh = {};
  fresh.k = k;
  fresh.capacity = capacity;
  fresh.listed = entries;
  fresh.exact = entries && k >= entries;
  // At least 1, since zeros are never selected; 1 means no guess.
  fresh.lo = fresh.guess = key > 1 ? key : 1;
  fresh.shift = key > 1 ? Shift<Real>::MARKING : Shift<Real>::WIDEST;
  *search = fresh;
}
