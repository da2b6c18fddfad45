// Keys: integers ordered like |x|: 0 for zeros; infinity, then NaN, above all numbers.
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

// The mask that clears the sign, and so the largest key.
template <class T>
constexpr Key<T> LARGEST = std::numeric_limits<Key<T>>::max();

// The key of infinity; smaller ones are finite.
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
