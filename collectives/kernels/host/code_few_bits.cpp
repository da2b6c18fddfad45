// int4, int3, int2: values <-> small integers, with a scale for each 256 or 240 of them, in the
// bytes of reference_values.py.
//
//   eight integers, a byte each    ..a ..b ..c ..d ..e ..f ..g ..h
//   packed in pairs                ....ab  ....cd  ....ef  ....gh      then in fours, then all
//
// int2 has five integers in a byte: the digits of a number of base 3.
#include "abi.hpp"
#include "scale.hpp"

namespace gtopk {
namespace {

template <int BITS>
constexpr std::int64_t BLOCK = BITS == 2 ? 240 : 256;
template <int BITS>
constexpr int GROUP = BITS == 2 ? 5 : 8;  // integers that fill whole bytes
template <int BITS>
constexpr int GROUP_BYTES = BITS == 2 ? 1 : BITS;
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
  return static_cast<std::size_t>(count * GROUP_BYTES<BITS> + GROUP<BITS> - 1) / GROUP<BITS>;
}

// The group that starts at `integers`, in the first GROUP_BYTES bytes.
template <int BITS>
GTOPK_INLINE std::uint64_t packed_group(const std::int8_t* integers) {
  if constexpr (BITS == 2) {
    const int first = integers[0] + 3 * integers[1] + 9 * integers[2];
    return static_cast<std::uint64_t>(121 + first + 27 * integers[3] + 81 * integers[4]);
  } else {
    constexpr std::uint64_t MASK = ((1u << BITS) - 1) * 0x0101010101010101;
    return together<BITS>(load<std::uint64_t>(integers) & MASK);
  }
}

// The five integers of each byte, an int8 each, and three of 0.
struct Digits {
  std::uint64_t of[256] = {};

  constexpr Digits() {
    for (unsigned byte = 0; byte < 256; byte++) {
      for (unsigned i = 0, rest = byte; i < 5; i++, rest /= 3) {
        of[byte] |= ((std::uint64_t{rest % 3} - 1) & 0xFF) << 8 * i;
      }
    }
  }
};
constexpr Digits DIGITS;

// The integers of a group of this many bytes, an int8 each.
template <int BITS>
GTOPK_INLINE std::uint64_t unpacked_group(const std::uint8_t* packed, std::size_t bytes) {
  if constexpr (BITS == 2) {
    return bytes ? DIGITS.of[packed[0]] : 0;
  } else {
    std::uint64_t word = 0;  // byte by byte: a memcpy of three bytes takes three times as long
    for (std::size_t i = 0; i < bytes; i++) word |= std::uint64_t{packed[i]} << 8 * i;
    // Extend the sign of a two's complement of few bits: none of the bytes' differences borrows.
    constexpr std::uint64_t HALF = (1u << (BITS - 1)) * 0x0101010101010101,
                            TOPS = 0x8080808080808080;
    return (((apart<BITS>(word) ^ HALF) | TOPS) - HALF) ^ TOPS;
  }
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
  constexpr int MOST = (1 << (BITS - 1)) - 1;
  std::int8_t integers[BLOCK<BITS> + 8] = {};
  if (byte != NOT_FINITE) {
    const BlockScale block(byte);
    const Scale<T> scale(block.shift - exponent);
    const T places = static_cast<T>(block.places);
    for (std::int64_t i = 0; i < count; i++) {
      const int integer = std::clamp(rounded(scale.of(values[i]) / places), -MOST, MOST);
      integers[i] = static_cast<std::int8_t>(integer);
    }
  }
  const std::int64_t whole = count / GROUP<BITS>;
  for (std::int64_t group = 0; group < whole; group++) {
    const std::uint64_t word = packed_group<BITS>(integers + group * GROUP<BITS>);
    std::memcpy(out + group * GROUP_BYTES<BITS>, &word, GROUP_BYTES<BITS>);
  }
  const std::uint64_t last = packed_group<BITS>(integers + whole * GROUP<BITS>);
  std::memcpy(out + whole * GROUP_BYTES<BITS>, &last, bytes_of<BITS>(count % GROUP<BITS>));
}

// Returns the exponent.
template <class T, int BITS>
GTOPK_INLINE std::int64_t pack(const T* values, std::int64_t count, std::uint8_t* out) {
  const int found = exponent_of<T>(largest_key(values, count)) - TOP<BITS>;
  const int exponent = std::max(found, FINEST<T>);
  const std::int64_t blocks = (count + BLOCK<BITS> - 1) / BLOCK<BITS>;
  std::uint8_t* const packed = out + blocks;
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK<BITS>, size = std::min(BLOCK<BITS>, count - from);
    const int byte = scale_byte<T, BITS>(largest_key(values + from, size), exponent);
    pack_block<T, BITS>(values + from, size, exponent, byte, packed + bytes_of<BITS>(from));
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
  std::int8_t integers[BLOCK<BITS> + 8];
  const std::int64_t whole = count / GROUP<BITS>;
  for (std::int64_t group = 0; group < whole; group++) {
    const std::uint8_t* const from = packed + group * GROUP_BYTES<BITS>;
    store(integers + group * GROUP<BITS>, unpacked_group<BITS>(from, GROUP_BYTES<BITS>));
  }
  const std::size_t rest = bytes_of<BITS>(count % GROUP<BITS>);
  store(integers + whole * GROUP<BITS>,
        unpacked_group<BITS>(packed + whole * GROUP_BYTES<BITS>, rest));
  const BlockScale block(byte);
  const Scale<T> scale(exponent - block.shift);
  for (std::int64_t i = 0; i < count; i++) {
    out[i] = scale.of(static_cast<T>(integers[i] * block.places));
  }
}

template <class T, int BITS>
GTOPK_INLINE void unpack(const std::uint8_t* data, std::int64_t count, int exponent, T* out) {
  const std::int64_t blocks = (count + BLOCK<BITS> - 1) / BLOCK<BITS>;
  for (std::int64_t b = 0; b < blocks; b++) {
    const std::int64_t from = b * BLOCK<BITS>, size = std::min(BLOCK<BITS>, count - from);
    unpack_block<T, BITS>(data + blocks + bytes_of<BITS>(from), size, exponent, data[b],
                          out + from);
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
