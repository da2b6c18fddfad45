// Sum the squares of several arrays in double, each added in the reference's order.
//
// launch: any number of blocks; 16 threads a chunk of 64Ki elements, strided.
//
//   chunk     0 1 2 ... 15 | 0 1 2 ... 15 | ...     16 running sums, each of every 16th element
//   squares                s                        the 16, added up from first to last
//   totals    the last block to finish adds up each array's chunks, from first to last
#include "block.cuh"
#include "parts.cuh"

constexpr u32 LANES = 16;
constexpr u64 CHUNK = 1 << 16;

// An array; start: the number of its first chunk.
struct Chunked {
  u64 start, address, size;
};

template <class Element>
__global__ __launch_bounds__(THREADS) void sum_squares(
    const Chunked* arrays_p, u32 p, u64 chunks, double* squares_c, u32* ticket, double* totals_p) {
  __shared__ double sums[THREADS];
  const u32 lane = threadIdx.x % LANES;
  constexpr u32 AT_ONCE = THREADS / LANES;
  for (u64 first = (u64)blockIdx.x * AT_ONCE; first < chunks; first += (u64)gridDim.x * AT_ONCE) {
    const u64 chunk = first + threadIdx.x / LANES;
    double sum = 0;
    if (chunk < chunks) {
      const Chunked array = arrays_p[part_of(arrays_p, p, chunk)];
      const Element* elements = (const Element*)array.address;
      const u64 begin = (chunk - array.start) * CHUNK;
      const u64 end = begin + CHUNK < array.size ? begin + CHUNK : array.size;
#pragma unroll 16
      for (u64 at = begin + lane; at < end; at += LANES) {
        const double value = in_double(widened(elements[at]));
        sum += value * value;
      }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (lane == 0 && chunk < chunks) {
      for (u32 other = 1; other < LANES; ++other) sum += sums[threadIdx.x + other];
      squares_c[chunk] = sum;
    }
    __syncthreads();
  }
  if (!last_block(ticket)) return;
  for (u32 array = threadIdx.x; array < p; array += THREADS) {
    const u64 end = array + 1 < p ? arrays_p[array + 1].start : chunks;
    double all = 0;
#pragma unroll 8
    for (u64 chunk = arrays_p[array].start; chunk < end; ++chunk) all += squares_c[chunk];
    totals_p[array] = all;
  }
}
