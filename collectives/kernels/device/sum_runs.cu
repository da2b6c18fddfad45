// Sum each run of equal indices in order, write the sum to the run's first place, and zeros after it.
//
// launch: any number of blocks, an entry a thread, strided.
//
//   indices   1  4  4  6
//   values    a  b  c  d
//   sums      a b+c 0  d         `split` drops entries whose value is zero
#include "block.cuh"

template <class Real, class Index>
__global__ __launch_bounds__(THREADS) void sum_runs(
    const Index* indices_m, const Real* values_m, u64 m, Real* sums_m) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < m; at += (u64)gridDim.x * THREADS) {
    const Index index = indices_m[at];
    Real sum = 0;
    if (at == 0 || indices_m[at - 1] != index) {
      sum = values_m[at];
      for (u64 next = at + 1; next < m && indices_m[next] == index; ++next)
        sum = added(sum, values_m[next]);
    }
    sums_m[at] = sum;
  }
}
