// Powers of two that bring values into the range of a narrower type: reference_values.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "code.hpp"
#include "keys.hpp"

namespace gtopk {

constexpr int BF16_TOP = 100, FP16_TOP = 14, INT8_TOP = 6;

// The smallest number is 2^FINEST.
template <class T>
constexpr int FINEST =
    std::numeric_limits<T>::min_exponent - std::numeric_limits<T>::digits;

// Of a block's scale: the finest of them, and that of a block which decodes as NaN.
constexpr int SMALLEST_STEP = 254, NOT_FINITE = 255;

// The largest key of the values: of a magnitude, or above all of them where one is not finite.
template <class T>
GTOPK_INLINE Key<T> largest_key(const T* values, std::int64_t count) {
  Key<T> largest = 0;
  for (std::int64_t i = 0; i < count; i++) largest = std::max(largest, key(values[i]));
  return largest;
}

// The e of 2^e <= m < 2^(e+1); one more than finite ones have where m is not, 0 for zero.
template <class T>
inline int exponent_of(Key<T> magnitude_key) {
  if (magnitude_key == 0) return 0;
  if (magnitude_key >= INFINITE<T>) return std::numeric_limits<T>::max_exponent;
  return std::ilogb(magnitude<T>(magnitude_key));
}

// To the nearest integer, ties to even, for |value| <= 128.
template <class T>
GTOPK_INLINE int rounded(T value) {
  using U = std::make_unsigned_t<Key<T>>;
  constexpr T SHIFT = static_cast<T>(std::uint64_t{3} << (std::numeric_limits<T>::digits - 2));
  const T sum = value + SHIFT;
  return static_cast<int>(static_cast<Key<T>>(load<U>(&sum) - load<U>(&SHIFT)));
}

// 2^exponent in two factors: itself it may be no number of this type.
template <class T>
struct Scale {
  T first, second;

  explicit Scale(int exponent)
      : first(std::ldexp(T{1}, exponent >> 1)),
        second(std::ldexp(T{1}, exponent - (exponent >> 1))) {}

  GTOPK_INLINE T of(T value) const { return value * first * second; }
};

}  // namespace gtopk
