// Round float32 values to 16 bits, to nearest and ties to even, and widen them again.
//
// launch: any number of blocks, a value a thread, strided.
#include "block.cuh"

template <class Narrow>
__global__ __launch_bounds__(THREADS) void round_values(
    const float* values_k, u64 k, Narrow* narrow_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS)
    narrow_to(narrow_k[at], values_k[at]);
}

template <class Narrow>
__global__ __launch_bounds__(THREADS) void widen_values(
    const Narrow* narrow_k, u64 k, float* values_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS)
    values_k[at] = widened(narrow_k[at]);
}
