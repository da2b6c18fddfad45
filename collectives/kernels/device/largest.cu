// The largest |value| of a list, as a key: infinity above every number, and NaN above infinity.
//
// launch: any number of blocks, a value a thread, strided. The result must be 0 before.
#include "block.cuh"

template <class Real>
__global__ __launch_bounds__(THREADS) void find_largest(const Real* values_k, u64 k, u64* largest) {
  u64 mine = 0;
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const u64 key = Keys<Real>::of(values_k[at]);
    if (key > mine) mine = key;
  }
  mine = warp_largest(mine);
  if (threadIdx.x % 32 == 0) atomicMax(largest, mine);
}
