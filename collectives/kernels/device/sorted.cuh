// Positions in sorted lists.
#pragma once
#include "block.cuh"

// How many of the indices are smaller than `wanted`.
template <class Index> __device__ u64 smaller(const Index* indices_m, u64 m, Index wanted) {
  u64 from = 0, to = m;
  while (from < to) {
    const u64 middle = (from + to) / 2;
    if (indices_m[middle] < wanted)
      from = middle + 1;
    else
      to = middle;
  }
  return from;
}
