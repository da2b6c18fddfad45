// Accumulate and mark: in one pass over memory add the gradient to the residual, and write one bit
// for each element: whether its key is at least the guess.
//
// The sum overwrites the residual, or is written to other memory, which leaves the residual for the
// case that the step does not count.
//
// launch: any number of blocks; a block takes tiles of 32 * THREADS elements, strided.
//
//   tile     | round 0              | round 1 | ... | round 7 |     4 elements a thread and round
//   warp     |lane 0|lane 1| ... |31|                              128 neighbours
//   nibbles   m0     m1           m31                              4 bits a lane ...
//   bits      word 0 (lanes 0..7) | word 1 | word 2 | word 3       ... 8 lanes a word
//
// For float32 that is 12 bytes of traffic an element, and 1/8 for its bit. Hits are also counted in
// a histogram of keys from the guess on, in shared memory. By that the last block to finish decides
// whether the guess was good.
//
//   gradient  | part 0 | part 1 |    part 2    | ...    one array, or one for each parameter
//   tiles     |    0    |    1    |    2    |  ...      the other vectors are read four at a time
#include "parts.cuh"
#include "tally.cuh"

// Decide where the search continues after marking: among the candidates, or in the whole vector.
template <class Real>
__device__ void judge(Search* search, u32* histogram, Tally* groups, u64 tiles) {
  const u64 k = search->k, guess = search->guess, aim = aimed_rank(k);
  const bool guessed = guess > 1;
  const Crossing at_k = crossing(histogram, k);
  const bool few = at_k.total < k, many = at_k.total > search->capacity;
  if (few && guessed) {  // the guess was too high: start over without one
    for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) histogram[bin] = 0;
    if (threadIdx.x == 0) {
      search->lo = 1;
      search->shift = Shift<Real>::WIDEST;
      search->dense = 1;
    }
  } else {
    if (threadIdx.x == 0) {
      search->dense = many;
      search->listed = at_k.total;
    }
    narrow(search, histogram);
    if (threadIdx.x == 0) {
      if (guessed && at_k.bin == BINS - 1) {  // the last bin also has all larger keys
        search->lo = guess + ((u64)(BINS - 1) << Shift<Real>::MARKING);
        search->shift = Shift<Real>::WIDEST;
        search->above = 0;
      }
      if (at_k.total < aim && guessed) {  // there are fewer marks than that: extrapolate
        typedef typename Keys<Real>::Key Key;
        const double lowest = in_double(Keys<Real>::value((Key)guess)), half = lowest / 2;
        const double at = in_double(Keys<Real>::value((Key)search->lo));
        const double slope = (at - lowest) / (double)(at_k.total - k);
        const double next = lowest - slope * (double)(aim - at_k.total);
        search->next = Keys<Real>::of(narrowed<Real>(next > half ? next : half));
      }
    }
  }
  __syncthreads();
  if (!search->dense) {
    scan_groups(groups, tiles);
  } else {  // `remark` counts anew
    for (u64 group = threadIdx.x; group * THREADS < tiles; group += THREADS)
      groups[group] = Tally{0, 0};
  }
}

// The vectors that `mark` reads and writes. SOURCES: 0 adds nothing; 1 adds weight * gradient; 2 adds
// the velocity after velocity = momentum * velocity + weight * gradient (Lin et al. 2018, section 3.2).
template <class Real, class Gradient> struct Vectors {
  const Real* residual_n;
  Real* sum_n;  // the residual itself, or memory beside it; so for the velocities
  const Real* velocity_n;
  Real* next_velocity_n;
  const Gradient* gradient_n;  // null where a tile spans several parts
  const Part* parts_p;
  u32 p;
  Real weight;
  Real momentum;
  u64 n;
};

// Read four gradients one by one, from any parts.
template <class Real, class Gradient>
__device__ Four<Gradient> gather(const Vectors<Real, Gradient>& vectors, u64 from) {
  Four<Gradient> four;
  const Part* parts_p = vectors.parts_p;
  u32 part = part_of(parts_p, vectors.p, from < vectors.n ? from : vectors.n - 1);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u64 at = from + i < vectors.n ? from + i : vectors.n - 1;
    while (part + 1 < vectors.p && parts_p[part + 1].start <= at) ++part;
    four.at[i] = ((const Gradient*)parts_p[part].address)[at - parts_p[part].start];
  }
  return four;
}

// How a tile is read. BY_FOURS: four aligned elements at a time. ONE_BY_ONE: the gradient element by
// element, as it is not aligned or in several parts. ANYHOW: nothing is assumed.
enum Lies { BY_FOURS, ONE_BY_ONE, ANYHOW };

// Accumulate and mark one tile; return the thread's hits. Except for ANYHOW, the tile must be whole
// and all vectors but the gradient aligned. So all loads of a round can be in flight at once.
template <class Real, class Gradient, int SOURCES, Lies LIES>
__device__ u32 mark_tile(
    const Vectors<Real, Gradient>& vectors, u64 tile, typename Keys<Real>::Key guess, int shift,
    u32* bits, u32* bins) {
  typedef Keys<Real> K;
  constexpr int ROUNDS = 8, AT_ONCE = 16 / sizeof(Real);
  constexpr bool WHOLE = LIES != ANYHOW;
  const u64 n = vectors.n;
  const u32 lane = threadIdx.x % 32;
  u32 hits = 0;
  for (int first = 0; first < ROUNDS; first += AT_ONCE) {
    Four<Real> sum[AT_ONCE], velocity[AT_ONCE];
    Four<Gradient> gradient[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u64 from = ((tile * ROUNDS + first + i) * THREADS + threadIdx.x) * 4;
      sum[i] = load(vectors.residual_n, from, n, WHOLE);
      if (SOURCES > 0)
        gradient[i] = LIES == BY_FOURS || vectors.gradient_n
            ? load(vectors.gradient_n, from, n, LIES == BY_FOURS)
            : gather(vectors, from);
      if (SOURCES > 1) velocity[i] = load(vectors.velocity_n, from, n, WHOLE);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const u64 from = ((tile * ROUNDS + first + i) * THREADS + threadIdx.x) * 4;
      u32 nibble = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (SOURCES > 1) {
          const Real fading = multiplied(velocity[i].at[j], vectors.momentum);
          const Real weighted = multiplied(widened(gradient[i].at[j]), vectors.weight);
          velocity[i].at[j] = added(fading, weighted);
          sum[i].at[j] = added(sum[i].at[j], velocity[i].at[j]);
        } else if (SOURCES > 0) {
          const Real weighted = multiplied(widened(gradient[i].at[j]), vectors.weight);
          sum[i].at[j] = added(sum[i].at[j], weighted);
        }
        nibble |= (u32)(K::of(sum[i].at[j]) >= guess && (WHOLE || from + j < n)) << j;
      }
      if (SOURCES > 0) store(vectors.sum_n, from, n, WHOLE, sum[i]);
      if (SOURCES > 1) store(vectors.next_velocity_n, from, n, WHOLE, velocity[i]);
      u32 packed = 0;
      if (__any_sync(ALL_LANES, nibble)) {
        packed = nibble << lane % 8 * 4;
        packed |= __shfl_xor_sync(ALL_LANES, packed, 1);
        packed |= __shfl_xor_sync(ALL_LANES, packed, 2);
        packed |= __shfl_xor_sync(ALL_LANES, packed, 4);
        hits += __popc(nibble);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (nibble >> j & 1) {
            const typename K::Key bin = (K::of(sum[i].at[j]) - guess) >> shift;
            atomicAdd(&bins[bin < BINS ? (u32)bin : BINS - 1], 1u);
          }
      }
      if (lane % 8 == 0) bits[from / 32] = packed;
    }
  }
  return hits;
}

// list_tallies: of the list that `expand` will make; cleared here, by many blocks in parallel.
// Four blocks on a multiprocessor have enough loads in flight to saturate memory. Without this
// launch bound the compiler aims at more blocks, and spills registers. With four it also spills some
// for doubles, and on compute capability 12.0.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define MARK_BLOCKS(Real) 3
#else
#define MARK_BLOCKS(Real) (sizeof(Real) > 4 ? 3 : 4)
#endif
template <class Real, class Gradient, int SOURCES>
__global__ __launch_bounds__(THREADS, SOURCES > 1 ? 2 : MARK_BLOCKS(Real)) void mark(
    const Real* residual_n, Real* sum_n, const Real* velocity_n, Real* next_velocity_n,
    const Part* parts_p, u32 p, const Request* request, u64 n, Search* search,
    u32* histogram, u32* bits, Tally* tallies, Tally* groups, Tally* list_tallies, u32 list_tiles) {
  typedef typename Keys<Real>::Key Key;
  __shared__ u32 bins[BINS];
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) bins[bin] = 0;
  for (u32 at = blockIdx.x * THREADS + threadIdx.x; at < list_tiles; at += gridDim.x * THREADS)
    list_tallies[at] = Tally{0, 0};
  __syncthreads();

  Vectors<Real, Gradient> vectors = {
      residual_n, sum_n, velocity_n, next_velocity_n, nullptr, parts_p, p,
      narrowed<Real>(request->weight), narrowed<Real>(request->momentum), n};
  const Key guess = (Key)search->guess;
  const int shift = (int)search->shift;
  const u64 tiles = (n + 32 * THREADS - 1) / (32 * THREADS);
  const bool by_fours = aligned(residual_n) && (SOURCES < 1 || aligned(sum_n)) &&
                        (SOURCES < 2 || (aligned(velocity_n) && aligned(next_velocity_n)));
  for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const u64 start = tile * 32 * THREADS, end = start + 32 * THREADS;
    if (SOURCES > 0) {
      const u32 at = part_of(parts_p, p, start);
      const bool alone = at + 1 == p || parts_p[at + 1].start >= end;
      vectors.gradient_n =
          alone ? (const Gradient*)parts_p[at].address - parts_p[at].start : nullptr;
    }
    u32 hits;
    if (end > n || !by_fours)
      hits = mark_tile<Real, Gradient, SOURCES, ANYHOW>(vectors, tile, guess, shift, bits, bins);
    else if (SOURCES < 1 || (vectors.gradient_n && aligned(vectors.gradient_n + start)))
      hits = mark_tile<Real, Gradient, SOURCES, BY_FOURS>(vectors, tile, guess, shift, bits, bins);
    else
      hits = mark_tile<Real, Gradient, SOURCES, ONE_BY_ONE>(vectors, tile, guess, shift, bits, bins);
    hits = block_sum(hits);
    if (threadIdx.x == 0) note(tallies, groups, tile, Tally{hits, 0});
  }

  // All hits are counted by now, as the block_sum of a tile is a barrier.
  for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS)
    if (bins[bin]) atomicAdd(&histogram[bin], bins[bin]);
  if (last_block(&search->ticket)) judge<Real>(search, histogram, groups, tiles);
}
