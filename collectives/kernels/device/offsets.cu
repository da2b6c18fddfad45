// Indices as 16-bit offsets in blocks of 64Ki elements, and back.
//
// launch: any number of blocks, an entry (or a 64Ki block) a thread, strided.
//
//   indices   3  9  200000            counts    2  0  0  1        of blocks 0, 1, 2, 3
//   offsets   3  9    3392            runs      0  2              starts: where a block's entries
//                                               0  3              begin; blocks: its number
#include "sorted.cuh"

template <class Index>
__global__ __launch_bounds__(THREADS) void pack_offsets(
    const Index* indices_k, u64 k, u16* offsets_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS)
    offsets_k[at] = (u16)(indices_k[at] & 0xffff);
}

// Two binary searches per 64Ki block: no atomics, and blocks without entries get their 0, too.
template <class Index>
__global__ __launch_bounds__(THREADS) void count_blocks(
    const Index* indices_k, u64 k, u32* counts_b, u64 b) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < b; at += (u64)gridDim.x * THREADS) {
    const u64 end = (at + 1) << 16;
    const u64 until = at + 1 == b ? k : smaller(indices_k, k, (Index)end);
    counts_b[at] = (u32)(until - smaller(indices_k, k, (Index)(at << 16)));
  }
}

// starts, blocks: of the r blocks that have entries.
template <class Index>
__global__ __launch_bounds__(THREADS) void unpack_offsets(
    const u16* offsets_k, u64 k, const u64* starts_r, const u64* blocks_r, u64 r,
    Index* indices_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const u64 run = smaller(starts_r, r, at + 1) - 1;
    indices_k[at] = (Index)(blocks_r[run] << 16 | offsets_k[at]);
  }
}
