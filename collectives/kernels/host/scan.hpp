// Scan: the only loop over all elements: add, store, and find the keys above a floor.
#pragma once

#include "keys.hpp"

namespace gtopk {

// dense = before + addend; write the ascending offsets of keys above `floor`, and return how many.
// `before` may be `dense`; it is if `addend` is null, and then dense is not written.
// offsets: room for count + SLACK.
// many:    hits are frequent, so do not branch on whether a SIMD vector has one: mispredictions
//          would cost more than the work saved.
template <class T>
using Scan = std::size_t (*)(T* dense, const T* before, const T* addend, std::size_t count,
                             Key<T> floor, bool many, std::uint32_t* offsets);

constexpr std::size_t MANY = 256;  // `many` is one hit in so many elements

constexpr std::int64_t SLACK = 16;  // results are stored as whole SIMD vectors

// A list that is being written, with room for SLACK more entries after its last.
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

// Without denormal floats as intermediate results: a thread may flush those to zero.
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

// An instruction set's functions; each scan_*.cpp defines one, and scan.cpp chooses.
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

// For the tail of a scan, and for a block with a hit in the portable scan.
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

// For the tail of a filter, and for all of it without SIMD.
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
