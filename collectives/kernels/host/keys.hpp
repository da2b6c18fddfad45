// Keys: integers in the order of |x|, with infinity and then NaN on top and zero at 0.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace gtopk {

template <class T>
struct KeyOf;
template <>
struct KeyOf<float> {
  using type = std::int32_t;
};
template <>
struct KeyOf<double> {
  using type = std::int64_t;
};

template <class T>
using Key = typename KeyOf<T>::type;

// The mask that takes the sign away, and the largest key there is.
template <class T>
constexpr Key<T> LARGEST = std::numeric_limits<Key<T>>::max();

// The key of infinity: whatever is not below it is not finite.
template <class T>
constexpr Key<T> INFINITE =
    LARGEST<T> - ((Key<T>{1} << (std::numeric_limits<T>::digits - 1)) - 1);

template <class T>
inline Key<T> key(T value) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits & LARGEST<T>;
}

template <class T>
inline T magnitude(Key<T> key) {
  T value;
  std::memcpy(&value, &key, sizeof value);
  return value;
}

}  // namespace gtopk
