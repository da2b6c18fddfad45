// int8: values <-> 8-bit integers, with a power of two for each 64 of them, in the bytes of
// reference_values.py.
#include "abi.hpp"
#include "scale.hpp"

namespace gtopk {
namespace {

constexpr std::int64_t BLOCK = 64;

// Write a block's integers, and return its step.
template <class T>
GTOPK_INLINE std::uint8_t pack_block(const T* values, std::int64_t count, int exponent,
                                     std::int8_t* out) {
  const Key<T> largest = largest_key(values, count);
  if (largest == 0 || largest >= INFINITE<T>) {
    std::fill(out, out + count, 0);
    return largest == 0 ? 0 : NOT_FINITE;
  }
  const int step = std::min(exponent - (exponent_of<T>(largest) - INT8_TOP), SMALLEST_STEP);
  const Scale<T> scale(step - exponent);
  for (std::int64_t i = 0; i < count; i++) {
    out[i] = static_cast<std::int8_t>(std::clamp(rounded(scale.of(values[i])), -127, 127));
  }
  return static_cast<std::uint8_t>(step);
}

// Returns the exponent.
template <class T>
GTOPK_INLINE std::int64_t pack(const T* values, std::int64_t count, std::uint8_t* out) {
  const int exponent = exponent_of<T>(largest_key(values, count)) - INT8_TOP;
  const std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
  auto* const integers = reinterpret_cast<std::int8_t*>(out + blocks);
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK, size = std::min(BLOCK, count - from);
    out[b] = pack_block(values + from, size, exponent, integers + from);
  }
  return exponent;
}

template <class T>
GTOPK_INLINE void unpack(const std::uint8_t* data, std::int64_t count, int exponent, T* out) {
  const std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
  const auto* const integers = reinterpret_cast<const std::int8_t*>(data + blocks);
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK, end = std::min(from + BLOCK, count);
    if (data[b] == NOT_FINITE) {
      std::fill(out + from, out + end, std::numeric_limits<T>::quiet_NaN());
      continue;
    }
    const Scale<T> scale(exponent - data[b]);
    for (std::int64_t i = from; i < end; i++) out[i] = scale.of(integers[i]);
  }
}

}  // namespace
}  // namespace gtopk

#define DEFINE(T, SUFFIX)                                                                       \
  GTOPK_API std::int64_t code_pack_int8_##SUFFIX(const T* values, std::int64_t count,           \
                                                 std::uint8_t* out) {                           \
    return gtopk::dispatch(                                                                     \
        [=]() __attribute__((always_inline)) { return gtopk::pack(values, count, out); });      \
  }                                                                                             \
  GTOPK_API std::int64_t code_unpack_int8_##SUFFIX(const std::uint8_t* data, std::int64_t count, \
                                                   std::int64_t exponent, T* out) {             \
    return gtopk::dispatch([=]() __attribute__((always_inline)) -> std::int64_t {               \
      gtopk::unpack(data, count, static_cast<int>(exponent), out);                              \
      return 0;                                                                                 \
    });                                                                                         \
  }
DEFINE(float, f32)
DEFINE(double, f64)
