// Set a flag if indices are not strictly increasing, or out of range.
//
// launch: any number of blocks, an index a thread, strided. The flag must be 0 before.
#include "block.cuh"

template <class Index>
__global__ __launch_bounds__(THREADS) void find_disorder(
    const Index* indices_k, u64 k, u64 length, u32* flag) {
  bool found = false;
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const Index index = indices_k[at];
    found |= index < 0 || (u64)index >= length || (at > 0 && indices_k[at - 1] >= index);
  }
  if (__syncthreads_or(found) && threadIdx.x == 0) *flag = 1;  // no race: all write 1
}
