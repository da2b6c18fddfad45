// Scan: the one loop over all elements; add, store, and find the keys above a floor.
#pragma once

#include "keys.hpp"

namespace gtopk {

// dense += addend (unless that is null), and the offsets of the keys above `floor`, ascending.
// Returns how many there are; `offsets` has room for count + SLACK. Where few are expected, a test
// spares the work on most vectors; where there are `many`, its outcome could not be predicted.
template <class T>
using Scan = std::size_t (*)(T* dense, const T* addend, std::size_t count, Key<T> floor, bool many,
                             std::uint32_t* offsets);

constexpr std::size_t MANY = 256;  // one hit in so many elements

constexpr std::size_t SLACK = 16;  // a vector of offsets is stored whole

// One set of instructions; each scan_*.cpp defines one, and `scan.cpp` chooses.
struct Instructions {
  const char* name;
  Scan<float> scan_float;
  Scan<double> scan_double;
};
extern const Instructions portable;
#if defined(__x86_64__)
extern const Instructions avx2, avx512;
#endif

const Instructions& instructions();

template <class T>
Scan<T> scan();
template <>
inline Scan<float> scan() {
  return instructions().scan_float;
}
template <>
inline Scan<double> scan() {
  return instructions().scan_double;
}

// The tail of every scan, and the whole of a block known to hold a hit.
template <class T>
inline std::size_t scan_one_by_one(T* dense, const T* addend, std::size_t begin, std::size_t end,
                                   Key<T> floor, std::uint32_t* offsets, std::size_t found) {
  for (std::size_t i = begin; i < end; i++) {
    if (addend) dense[i] += addend[i];
    offsets[found] = static_cast<std::uint32_t>(i);
    found += key(dense[i]) > floor;
  }
  return found;
}

}  // namespace gtopk
