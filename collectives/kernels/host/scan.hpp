// Scan: the one loop over all elements; add, store, and find the keys above a floor.
#pragma once

#include "keys.hpp"

namespace gtopk {

// dense = before + addend, and the offsets of the keys above `floor`, ascending. `before` may be
// `dense` itself, and is where the addend is null: nothing is written then.
// Returns how many there are; `offsets` has room for count + SLACK. Where few are expected, a test
// spares the work on most vectors; where there are `many`, its outcome could not be predicted.
template <class T>
using Scan = std::size_t (*)(T* dense, const T* before, const T* addend, std::size_t count,
                             Key<T> floor, bool many, std::uint32_t* offsets);

constexpr std::size_t MANY = 256;  // one hit in so many elements

constexpr std::int64_t SLACK = 16;  // a vector of what is found is stored whole

// A list that is being written, with room for SLACK entries more behind its last.
template <class T, class I>
struct Output {
  I* indices;
  T* values;
  std::int64_t count;
};

// Append the entries whose keys are above the floor.
template <class T, class I>
using Filter = void (*)(const I* indices, const T* values, std::int64_t count, Key<T> floor,
                        Output<T, I>& output);

// float16 to float32.
using Widen = void (*)(const std::uint16_t* halves, std::size_t count, float* into);

inline float from_bfloat16(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// No step of it has a denormal float, which a thread can have asked to be zero.
inline float from_float16(std::uint16_t half) {
  const std::uint32_t magnitude = (half & 0x7fffu) << 13;
  const std::uint32_t exponent = magnitude & 0x0f800000u;
  std::uint32_t bits = magnitude + (112u << 23);      // the exponent's bias: 127 - 15
  bits += exponent == 0x0f800000u ? 112u << 23 : 0u;  // infinity and NaN
  std::uint32_t denormal = bits + (1u << 23);         // 2^-14 + the fraction's value,
  float value;
  std::memcpy(&value, &denormal, sizeof value);
  value -= 0x1p-14f;                                  // less 2^-14
  std::memcpy(&denormal, &value, sizeof value);
  bits = (exponent == 0 ? denormal : bits) | (half & 0x8000u) << 16;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// One set of instructions; each scan_*.cpp defines one, and `scan.cpp` chooses.
struct Instructions {
  const char* name;
  Scan<float> scan_float;
  Scan<double> scan_double;
  Widen widen;
  Filter<float, std::int32_t> filter;
};
extern const Instructions portable;
#if defined(__x86_64__)
extern const Instructions avx2, avx512;
void widen_f16c(const std::uint16_t* halves, std::size_t count, float* into);
void filter_avx2(const std::int32_t* indices, const float* values, std::int64_t count,
                 std::int32_t floor, Output<float, std::int32_t>& output);
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
inline std::size_t scan_one_by_one(T* dense, const T* before, const T* addend, std::size_t begin,
                                   std::size_t end, Key<T> floor, std::uint32_t* offsets,
                                   std::size_t found) {
  for (std::size_t i = begin; i < end; i++) {
    if (addend) dense[i] = before[i] + addend[i];
    offsets[found] = static_cast<std::uint32_t>(i);
    found += key(dense[i]) > floor;
  }
  return found;
}

// The tail of every filter, and the whole of one without vectors.
template <class T, class I>
void filter_one_by_one(const I* indices, const T* values, std::int64_t count, Key<T> floor,
                       Output<T, I>& output) {
  Output<T, I> to = output;  // in registers
  for (std::int64_t i = 0; i < count; i++) {  // without a branch
    to.indices[to.count] = indices[i];
    to.values[to.count] = values[i];
    to.count += key(values[i]) > floor;
  }
  output = to;
}

}  // namespace gtopk
