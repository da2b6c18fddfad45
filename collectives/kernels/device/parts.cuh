// Parts: a vector that lies in several arrays, one after the other.
#pragma once

#include "numbers.cuh"

// One of the arrays that follow each other in a vector.
struct Part {
  u64 start, address;
};

// The part that holds an element: the last that starts there or before, so empty ones are skipped.
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
