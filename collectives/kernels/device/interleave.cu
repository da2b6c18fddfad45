// Interleave two sorted lists into one, in which an index of both is there twice, a's entry first.
//
// launch: any number of blocks, an entry a thread, strided.
//
//   a   1  4        an entry's place = its position + how many entries of the other list precede it:
//   b      4  6     those of b that are smaller; those of a that are smaller or equal
//       1  4  4  6
#include "sorted.cuh"

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void interleave(
    const Index* a_indices, const Real* a_values, u64 a_count, const Index* b_indices,
    const Real* b_values, u64 b_count, Index* indices, Real* values) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < a_count + b_count;
       at += (u64)gridDim.x * THREADS) {
    const bool of_a = at < a_count;
    const u64 own = of_a ? at : at - a_count;
    const Index index = of_a ? a_indices[own] : b_indices[own];
    // index + 1, to count smaller or equal ones.
    const u64 to = own + (of_a ? smaller(b_indices, b_count, index)
                               : smaller(a_indices, a_count, (Index)(index + 1)));
    indices[to] = index;
    values[to] = of_a ? a_values[own] : b_values[own];
  }
}
