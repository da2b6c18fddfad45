// int4, int3, int2: values <-> integers of so many bits, with a scale for each 256 of them, in the
// bytes of reference_values.py.
//
//   eight integers, a byte each    ..a ..b ..c ..d ..e ..f ..g ..h
//   packed in pairs                ....ab  ....cd  ....ef  ....gh      then in fours, then all
#include "abi.hpp"
#include "scale.hpp"

namespace gtopk {
namespace {

constexpr std::int64_t BLOCK = 256;
constexpr int GROUP = 8;  // integers that fill whole bytes
constexpr std::uint64_t BYTES = 0x00FF00FF00FF00FF, PAIRS = 0x0000FFFF0000FFFF,
                        FOURS = 0x00000000FFFFFFFF;

template <int BITS>
constexpr int TOP = BITS + 2;

// The bits of eight bytes that are smaller than 2^BITS, side by side.
template <int BITS>
GTOPK_INLINE std::uint64_t together(std::uint64_t word) {
  word = (word & BYTES) | (word >> 8 & BYTES) << BITS;
  word = (word & PAIRS) | (word >> 16 & PAIRS) << 2 * BITS;
  return (word & FOURS) | word >> 32 << 4 * BITS;
}

template <int BITS>
GTOPK_INLINE std::uint64_t apart(std::uint64_t word) {
  constexpr std::uint64_t FOUR = (std::uint64_t{1} << 4 * BITS) - 1,
                          TWO = ((1u << 2 * BITS) - 1) * 0x0000000100000001,
                          ONE = ((1u << BITS) - 1) * 0x0001000100010001;
  word = (word & FOUR) | word >> 4 * BITS << 32;
  word = (word & TWO) | (word >> 2 * BITS & TWO) << 16;
  return (word & ONE) | (word >> BITS & ONE) << 8;
}

template <int BITS>
constexpr std::size_t bytes_of(std::int64_t count) {
  return static_cast<std::size_t>(count * BITS + 7) / 8;
}

// A block's scale is places * 2^(exponent - shift).
struct BlockScale {
  int places, shift;

  explicit BlockScale(int byte) : places(15 - byte % 8), shift(byte / 8) {}
};

template <class T, int BITS>
GTOPK_INLINE int scale_byte(Key<T> largest, int exponent) {
  if (largest == 0) return 0;
  if (largest >= INFINITE<T>) return NOT_FINITE;
  const int found = exponent_of<T>(largest);
  int places = static_cast<int>(Scale<T>(3 - found).of(magnitude<T>(largest)));
  int shift = exponent - (found - TOP<BITS>);
  const int most = exponent - FINEST<T>;  // no scale is finer than the smallest positive number
  if (shift > most) {
    shift = most;
    places = 8;
  }
  return std::min(8 * shift + 15 - places, SMALLEST_STEP);
}

template <class T, int BITS>
GTOPK_INLINE void pack_block(const T* values, std::int64_t count, int exponent, int byte,
                             std::uint8_t* out) {
  constexpr int MOST = (1 << (BITS - 1)) - 1, MASK = (1 << BITS) - 1;
  std::uint8_t integers[BLOCK + GROUP] = {};
  if (byte != NOT_FINITE) {
    const BlockScale block(byte);
    const Scale<T> scale(block.shift - exponent);
    const T places = static_cast<T>(block.places);
    for (std::int64_t i = 0; i < count; i++) {
      const int integer = std::clamp(rounded(scale.of(values[i]) / places), -MOST, MOST);
      integers[i] = static_cast<std::uint8_t>(integer & MASK);
    }
  }
  const std::int64_t whole = count / GROUP;
  for (std::int64_t group = 0; group < whole; group++) {
    const std::uint64_t word = together<BITS>(load<std::uint64_t>(integers + group * GROUP));
    std::memcpy(out + group * BITS, &word, BITS);
  }
  const std::uint64_t last = together<BITS>(load<std::uint64_t>(integers + whole * GROUP));
  std::memcpy(out + whole * BITS, &last, bytes_of<BITS>(count % GROUP));
}

// Returns the exponent.
template <class T, int BITS>
GTOPK_INLINE std::int64_t pack(const T* values, std::int64_t count, std::uint8_t* out) {
  const int found = exponent_of<T>(largest_key(values, count)) - TOP<BITS>;
  const int exponent = std::max(found, FINEST<T>);
  const std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
  std::uint8_t* const packed = out + blocks;
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK, size = std::min(BLOCK, count - from);
    const int byte = scale_byte<T, BITS>(largest_key(values + from, size), exponent);
    pack_block<T, BITS>(values + from, size, exponent, byte, packed + from * BITS / 8);
    out[b] = static_cast<std::uint8_t>(byte);
  }
  return exponent;
}

template <class T, int BITS>
GTOPK_INLINE void unpack_block(const std::uint8_t* packed, std::int64_t count, int exponent,
                               int byte, T* out) {
  if (byte == NOT_FINITE) {
    std::fill(out, out + count, std::numeric_limits<T>::quiet_NaN());
    return;
  }
  constexpr int HALF = 1 << (BITS - 1);
  std::uint8_t integers[BLOCK + GROUP];
  const std::int64_t whole = count / GROUP;
  for (std::int64_t group = 0; group < whole; group++) {
    std::uint64_t word = 0;  // byte by byte: a memcpy of three bytes takes three times as long
    for (int i = 0; i < BITS; i++) word |= std::uint64_t{packed[group * BITS + i]} << 8 * i;
    store(integers + group * GROUP, apart<BITS>(word));
  }
  std::uint64_t last = 0;
  std::memcpy(&last, packed + whole * BITS, bytes_of<BITS>(count % GROUP));
  store(integers + whole * GROUP, apart<BITS>(last));
  const BlockScale block(byte);
  const Scale<T> scale(exponent - block.shift);
  for (std::int64_t i = 0; i < count; i++) {
    out[i] = scale.of(static_cast<T>(((integers[i] ^ HALF) - HALF) * block.places));
  }
}

template <class T, int BITS>
GTOPK_INLINE void unpack(const std::uint8_t* data, std::int64_t count, int exponent, T* out) {
  const std::int64_t blocks = (count + BLOCK - 1) / BLOCK;
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK, size = std::min(BLOCK, count - from);
    unpack_block<T, BITS>(data + blocks + from * BITS / 8, size, exponent, data[b], out + from);
  }
}

}  // namespace
}  // namespace gtopk

#define DEFINE(BITS, T, SUFFIX)                                                                   \
  GTOPK_API std::int64_t code_pack_int##BITS##_##SUFFIX(const T* values, std::int64_t count,      \
                                                        std::uint8_t* out) {                      \
    return gtopk::dispatch([=]() __attribute__((always_inline)) {                                 \
      return gtopk::pack<T, BITS>(values, count, out);                                            \
    });                                                                                           \
  }                                                                                               \
  GTOPK_API std::int64_t code_unpack_int##BITS##_##SUFFIX(                                        \
      const std::uint8_t* data, std::int64_t count, std::int64_t exponent, T* out) {              \
    return gtopk::dispatch([=]() __attribute__((always_inline)) -> std::int64_t {                 \
      gtopk::unpack<T, BITS>(data, count, static_cast<int>(exponent), out);                       \
      return 0;                                                                                   \
    });                                                                                           \
  }
DEFINE(4, float, f32)
DEFINE(4, double, f64)
DEFINE(3, float, f32)
DEFINE(3, double, f64)
DEFINE(2, float, f32)
DEFINE(2, double, f64)
