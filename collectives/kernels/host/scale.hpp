// Scaling by powers of two into the range of a narrower type, as in reference_values.py.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "code.hpp"
#include "keys.hpp"

namespace gtopk {

constexpr int BF16_TOP = 100, FP16_TOP = 14, INT8_TOP = 6;

// The smallest positive number is 2^FINEST.
template <class T>
constexpr int FINEST =
    std::numeric_limits<T>::min_exponent - std::numeric_limits<T>::digits;

// Bytes of a block's scale: of the finest one, and of a block that decodes as NaN.
constexpr int SMALLEST_STEP = 254, NOT_FINITE = 255;

// The largest key of the values; INFINITE or more if one of them is not finite.
template <class T>
GTOPK_INLINE Key<T> largest_key(const T* values, std::int64_t count) {
  Key<T> largest = 0;
  for (std::int64_t i = 0; i < count; i++) largest = std::max(largest, key(values[i]));
  return largest;
}

// The e with 2^e <= m < 2^(e+1); 0 for zero, and one above the largest for infinity and NaN.
template <class T>
inline int exponent_of(Key<T> magnitude_key) {
  if (magnitude_key == 0) return 0;
  if (magnitude_key >= INFINITE<T>) return std::numeric_limits<T>::max_exponent;
  return std::ilogb(magnitude<T>(magnitude_key));
}

// Round to the nearest integer, ties to even, for |value| <= 128.
template <class T>
GTOPK_INLINE int rounded(T value) {
  using U = std::make_unsigned_t<Key<T>>;
  constexpr T SHIFT = static_cast<T>(std::uint64_t{3} << (std::numeric_limits<T>::digits - 2));
  const T sum = value + SHIFT;
  return static_cast<int>(static_cast<Key<T>>(load<U>(&sum) - load<U>(&SHIFT)));
}

// 2^exponent as two factors, since it may be out of the type's range.
template <class T>
struct Scale {
  T first, second;

  explicit Scale(int exponent)
      : first(std::ldexp(T{1}, exponent >> 1)),
        second(std::ldexp(T{1}, exponent - (exponent >> 1))) {}

  GTOPK_INLINE T of(T value) const { return value * first * second; }
};

}  // namespace gtopk
