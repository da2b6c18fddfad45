// Put: set entries of a vector in the arrays that make it up, converted to their type.
//
// launch: any number of blocks, an entry a thread, strided.
//
//   vector    |   .  x  |  . |     x    .    | ...    a binary search finds an entry's part
//   parts     |    0    |  1 |       2       | ...
#include "block.cuh"
#include "parts.cuh"

template <class Real, class Index, class Element>
__global__ __launch_bounds__(THREADS) void put_at(
    const Part* parts_p, u32 p, const Index* indices_k, const Real* values_k, u64 k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const u64 index = (u64)indices_k[at];
    const Part part = parts_p[part_of(parts_p, p, index)];
    narrow_to(((Element*)part.address)[index - part.start], values_k[at]);
  }
}
