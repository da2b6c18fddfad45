// Entries of a dense vector: added to, cleared, or taken out. Indices are unique, so no atomics.
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

// Gather and clear: what `take_at` moves to the values is zero in the dense vector afterwards.
template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void take_at(
    Real* dense_n, const Index* indices_k, Real* values_k, u64 k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    values_k[at] = dense_n[indices_k[at]];
    dense_n[indices_k[at]] = 0;
  }
}
