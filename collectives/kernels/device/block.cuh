// Collective operations of a block's threads; every block of every kernel has THREADS of them.
#pragma once
#include "numbers.cuh"

#ifndef THREADS
#define THREADS 256
#endif

constexpr u32 WARPS = THREADS / 32;
constexpr u32 ALL_LANES = 0xffffffffu;

// The sum over the warp, in a fixed order; returned to every lane.
template <class T> __device__ T warp_sum(T value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2)
    value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}

// The largest over the warp; returned to every lane.
template <class T> __device__ T warp_largest(T value) {
#pragma unroll
  for (int distance = 16; distance; distance /= 2) {
    const T other = __shfl_xor_sync(ALL_LANES, value, distance);
    if (other > value) value = other;
  }
  return value;
}

// The sum over the lanes up to and including this one.
template <class T> __device__ T warp_inclusive(T value) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T other = __shfl_up_sync(ALL_LANES, value, distance);
    if (threadIdx.x % 32 >= (u32)distance) value += other;
  }
  return value;
}

// The sum over the block, in a fixed order; returned to every thread.
template <class T> __device__ T block_sum(T value) {
  __shared__ T of_warp[WARPS];
  value = warp_sum(value);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  T total = of_warp[0];
  for (u32 warp = 1; warp < WARPS; ++warp) total += of_warp[warp];
  __syncthreads();
  return total;
}

// The sum over the threads before this one; total: over the block.
template <class T> __device__ T block_exclusive(T value, T& total) {
  __shared__ T of_warp[WARPS];
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inclusive = warp_inclusive(value);
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  T before = inclusive - value;
  total = 0;
  for (u32 other = 0; other < WARPS; ++other) {
    if (other < warp) before += of_warp[other];
    total += of_warp[other];
  }
  __syncthreads();
  return before;
}

// Whether this block is the last of its grid to get here, and so can read what all others wrote.
//
//   write, fence | ticket | fence, read      the second fence invalidates this block's cache
static __device__ bool last_block(u32* ticket) {
  __shared__ bool last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    if (last) *ticket = 0;
  }
  __syncthreads();
  if (last) __threadfence();
  return last;
}
