// Sum the squares in double, in the order of additions that the reference has.
//
// launch: any number of blocks; 16 threads a chunk of 64Ki elements, strided.
//
//   chunk     0 1 2 ... 15 | 0 1 2 ... 15 | ...     16 running sums, each of every 16th element
//   squares                s                        the 16, added up from the first to the last
//   total     the last block to finish adds up the chunks, from the first to the last
#include "block.cuh"

constexpr u32 LANES = 16;
constexpr u64 CHUNK = 1 << 16;

template <class Real>
__global__ __launch_bounds__(THREADS) void sum_squares(
    const Real* array_n, u64 n, double* squares_c, u32* ticket, double* total) {
  __shared__ double sums[THREADS];
  const u64 chunks = (n + CHUNK - 1) / CHUNK;
  const u32 lane = threadIdx.x % LANES;
  constexpr u32 AT_ONCE = THREADS / LANES;
  for (u64 first = (u64)blockIdx.x * AT_ONCE; first < chunks; first += (u64)gridDim.x * AT_ONCE) {
    const u64 chunk = first + threadIdx.x / LANES;
    const u64 end = (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n;
    double sum = 0;
#pragma unroll 8
    for (u64 at = chunk * CHUNK + lane; at < end; at += LANES)
      sum += in_double(array_n[at]) * in_double(array_n[at]);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && chunk < chunks) {
      for (u32 other = 1; other < LANES; ++other) sum += sums[threadIdx.x + other];
      squares_c[chunk] = sum;
    }
    __syncthreads();
  }
  if (!last_block(ticket)) return;
  double all = 0;
  for (u64 first = 0; first < chunks; first += THREADS) {  // many loads, then one thread's sum
    const u64 chunk = first + threadIdx.x;
    sums[threadIdx.x] = chunk < chunks ? squares_c[chunk] : 0;
    __syncthreads();
    if (threadIdx.x == 0)
      for (u32 i = 0; i < THREADS && first + i < chunks; ++i) all += sums[i];
    __syncthreads();
  }
  if (threadIdx.x == 0) *total = all;
}
