// Entries of a dense vector: add to them, or clear them. Indices are unique, so no atomics.
//
// launch: any number of blocks, an entry a thread, strided.
#include "block.cuh"

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void add_at(
    Real* dense_n, const Index* indices_k, const Real* values_k, u64 k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS)
    dense_n[indices_k[at]] = added(dense_n[indices_k[at]], values_k[at]);
}

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void clear_at(Real* dense_n, const Index* indices_k, u64 k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS)
    dense_n[indices_k[at]] = 0;
}
