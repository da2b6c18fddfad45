// Tell, for each wanted index, whether the list has it; both are sorted.
//
// launch: any number of blocks, a wanted index a thread, strided.
#include "sorted.cuh"

template <class Index>
__global__ __launch_bounds__(THREADS) void contains(
    const Index* indices_m, u64 m, const Index* wanted_k, u64 k, bool* found_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const Index wanted = wanted_k[at];
    const u64 place = smaller(indices_m, m, wanted);
    found_k[at] = place < m && indices_m[place] == wanted;
  }
}
