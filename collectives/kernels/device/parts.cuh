// Parts: the arrays that together make up one vector, in order.
#pragma once

#include "numbers.cuh"

// One of the arrays; start: where it begins in the vector.
struct Part {
  u64 start, address;
};

// The part that has an element: the last one that starts at or before it. (This skips empty ones.)
template <class AnyPart> __device__ u32 part_of(const AnyPart* parts_p, u32 p, u64 element) {
  u32 from = 0, to = p;
  while (to - from > 1) {
    const u32 middle = (from + to) / 2;
    if (parts_p[middle].start <= element)
      from = middle;
    else
      to = middle;
  }
  return from;
}
