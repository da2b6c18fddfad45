// The search for the k-th largest key. Its state stays on the device.
//
//      0        lo      lo + (bin << shift)                       lo + (BINS << shift)
//      +---------+--------+--------+--------+-- ... --+--------+-----------------------+
//      |         |  bin 0 |  bin 1 |  k-th  |         |        |  `above` larger keys   |
//      +---------+--------+--------+--------+-- ... --+--------+-----------------------+
//
// A histogram of the keys in the range gives the bin of the k-th. That bin is the next range, 2048
// times as narrow, until a bin is one key wide. Then `exact` is set, and all keys above `floor` are
// kept, and the first `quota` that equal it.
#pragma once
#include "block.cuh"

constexpr int BIN_BITS = 11;
constexpr u32 BINS = 1u << BIN_BITS;

// The rank whose key is the next guess. The k selected entries are cleared, so today's ranks from
// k+1 on are the next step's candidates; a guess nearer to rank k would too often be too high. The
// constant is for tiny k.
static __device__ u64 aimed_rank(u64 k) { return k * 11 / 5 + 32; }

struct Search {
  // The outcome, which the host reads in this order.
  u64 kept, next;  // entries kept; the next guess, a key
  u64 dense;       // there were too few or too many marks: search the whole vector
  // The request.
  u64 k, capacity, guess;  // how many to keep; room in the list; mark keys >= guess
  // The state.
  u64 lo, shift, above;
  u64 exact;
  u64 floor, quota;  // keep all keys above the floor, and the first `quota` that equal it
  u64 listed;        // entries in the list
  u32 ticket, contenders;  // contenders: in the range when the list was made, noted or not
};

// A selection's parameters, in device memory, so that a CUDA graph can be replayed with other ones.
struct Request {
  double weight, momentum;
  double guess;  // about the k-th largest |value|; 0 or less: none; NaN: the last search's `next`
};

// Whether a key lies above the range of the search, and inside it.
static __device__ __forceinline__ bool above_range(u64 key, u64 lo, u64 shift) {
  return key >= lo && (key - lo) >> shift >= BINS;
}
static __device__ __forceinline__ bool in_range(u64 key, u64 lo, u64 shift) {
  return key >= lo && (key - lo) >> shift < BINS;
}

// Write the outcome; called by one thread. No next guess (0) if there are fewer than k entries, or
// if it would not be finite.
template <class Real> __device__ void conclude(Search* search, u64 kept) {
  search->kept = kept;
  if (search->next > search->floor) search->next = search->floor;
  if (kept < search->k || search->next >= Keys<Real>::INFINITE) search->next = 0;
}

// Log2 of a bin's width: a multiple of BIN_BITS, so that a bin is the next level's range.
template <class Real> struct Shift {
  static constexpr int WIDEST = (Keys<Real>::BITS - 1) / BIN_BITS * BIN_BITS;  // covers all keys
  // For keys from a guess on: 1/256 octave or less. The last bin also counts all larger keys.
  static constexpr int MARKING = (Keys<Real>::MANTISSA_BITS - 8) / BIN_BITS * BIN_BITS;
};

// Counts of keys above the floor, and equal to it.
struct Tally {
  u32 above, ties;
};

struct Crossing {
  u32 bin, before, inside;  // the bin of the rank; counts of the bins above it, and of it
  u32 total;                // of all bins; if less than the rank, the others are not set
};

// Find the bin of the rank-th largest key (from 1 on) in a histogram; called by the whole block.
static __device__ Crossing crossing(const u32* histogram, u64 rank) {
  constexpr u32 EACH = BINS / THREADS;
  __shared__ Crossing found;
  const u32 top = BINS - 1 - threadIdx.x * EACH;
  u32 sum = 0, total;
  for (u32 i = 0; i < EACH; ++i) sum += histogram[top - i];
  u32 before = block_exclusive(sum, total);
  if (threadIdx.x == 0) found.total = total;
  if (before < rank && rank <= (u64)before + sum) {
    u32 bin = top;
    while (rank > (u64)before + histogram[bin]) before += histogram[bin--];
    found.bin = bin;
    found.before = before;
    found.inside = histogram[bin];
  }
  __syncthreads();
  const Crossing answer = found;
  __syncthreads();
  return answer;
}

// Estimate the key of a rank inside its bin, as if the bin's keys were evenly spread.
static __device__ u64 key_inside(const Search* search, const Crossing& at, u64 rank) {
  const double below = (double)(search->above + at.before + at.inside - rank) / at.inside;
  return search->lo + ((u64)at.bin << search->shift) + (u64)(below * (double)(1ull << search->shift));
}

// Narrow the range to the bin of the k-th key, and clear the histogram; called by the last block.
static __device__ void narrow(Search* search, u32* histogram) {
  const u64 aim = aimed_rank(search->k);
  const Crossing at_aim = crossing(histogram, aim - search->above);
  const Crossing at_k = crossing(histogram, search->k - search->above);
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
  if (threadIdx.x == 0) {
    if (search->above + at_aim.total >= aim) search->next = key_inside(search, at_aim, aim);
    if (search->above + at_k.total < search->k) {  // there are fewer than k: keep all
      search->above += at_k.total;
      search->lo = search->shift = 0;
      search->exact = 1;
    } else {
      search->above += at_k.before;
      search->lo += (u64)at_k.bin << search->shift;
      search->exact = search->shift == 0;
      if (search->shift) search->shift -= BIN_BITS;
    }
    if (search->exact) {
      search->floor = search->lo;
      search->quota = search->lo ? search->k - search->above : 0;
      if (search->dense) search->listed = search->above + search->quota;
    }
  }
  __syncthreads();
}
