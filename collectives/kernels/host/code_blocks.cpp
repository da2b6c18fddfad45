// blocks: indices <-> 16-bit offsets in blocks of 64Ki, in the bytes of reference_indices.py. Also
// the check of raw indices.
#include "abi.hpp"
#include "code.hpp"

namespace gtopk {
namespace {

constexpr int BLOCK_BITS = 16;
constexpr std::uint64_t BLOCK = 1 << BLOCK_BITS;
constexpr int MOST_BYTES = 7;

// Whether 0 <= indices[0] < indices[1] < ... < length.
template <class I>
GTOPK_INLINE std::int64_t in_order(const std::uint8_t* indices, std::int64_t count,
                                   std::int64_t length) {
  if (count == 0) return 1;
  const auto at = [=](std::int64_t i) __attribute__((always_inline)) {
    return load<I>(indices + i * static_cast<std::int64_t>(sizeof(I)));
  };
  I falls = 0;
  for (std::int64_t i = 1; i < count; i++) falls |= at(i) <= at(i - 1);
  return !falls && at(0) >= 0 && at(count - 1) < length;
}

inline std::uint8_t* write(std::uint64_t number, std::uint8_t* out) {
  for (; number >= 128; number >>= 7) *out++ = static_cast<std::uint8_t>(number) | 128;
  *out++ = static_cast<std::uint8_t>(number);
  return out;
}

// Read a number, and return where the next begins; null if it is cut off, or too long.
inline const std::uint8_t* read(const std::uint8_t* from, const std::uint8_t* end,
                                std::uint64_t& number) {
  number = 0;
  for (int place = 0; place < MOST_BYTES && from != end; place++) {
    const std::uint64_t byte = *from++;
    number |= (byte & 127) << 7 * place;
    if (byte < 128) return from;
  }
  return nullptr;
}

template <class I>
GTOPK_INLINE std::int64_t pack(const I* indices, std::int64_t count, std::uint8_t* out) {
  for (std::int64_t i = 0; i < count; i++) {
    store(out + 2 * i, static_cast<std::uint16_t>(indices[i]));
  }
  std::uint8_t* tail = out + 2 * count;
  std::int64_t next = 0;  // the block after those written
  for (std::int64_t i = 0; i < count;) {
    const std::int64_t block = indices[i] >> BLOCK_BITS;
    if (block > next) {
      *tail++ = 0;
      tail = write(block - next, tail);
    }
    const I last = indices[i] | static_cast<I>(BLOCK - 1);
    const std::int64_t begin = i;
    while (i + 16 <= count && indices[i + 15] <= last) i += 16;
    while (i < count && indices[i] <= last) i++;
    tail = write(i - begin, tail);
    next = block + 1;
  }
  return tail - out;
}

// Write a block's indices, and return true if its offsets are not strictly increasing.
template <class I>
GTOPK_INLINE bool unpack_block(const std::uint8_t* offsets, std::int64_t count, I base, I* out) {
  std::uint16_t falls = 0;
  out[0] = base | load<std::uint16_t>(offsets);
  for (std::int64_t i = 1; i < count; i++) {
    const auto offset = load<std::uint16_t>(offsets + 2 * i);
    falls |= offset <= load<std::uint16_t>(offsets + 2 * i - 2);
    out[i] = base | offset;
  }
  return falls;
}

// Returns the bytes taken, or MALFORMED.
template <class I>
GTOPK_INLINE std::int64_t unpack(const std::uint8_t* data, std::int64_t size, std::int64_t count,
                                 std::int64_t length, I* out) {
  if (count == 0) return 0;
  if (size / 2 < count) return MALFORMED;
  const std::uint8_t *at = data + 2 * count, *const end = data + size;
  const std::uint64_t blocks = ((static_cast<std::uint64_t>(length) - 1) >> BLOCK_BITS) + 1;
  std::uint64_t block = 0, number;
  bool falls = false;
  for (std::int64_t done = 0; done < count;) {
    if (!(at = read(at, end, number))) return MALFORMED;
    if (number == 0) {
      if (!(at = read(at, end, number)) || number == 0 || number > blocks - block) return MALFORMED;
      block += number;
      continue;
    }
    const auto left = static_cast<std::uint64_t>(count - done);
    if (block >= blocks || number > BLOCK || number > left) return MALFORMED;
    falls |= unpack_block(data + 2 * done, number, static_cast<I>(block << BLOCK_BITS), out + done);
    done += number;
    block++;
  }
  return falls || out[count - 1] >= length ? MALFORMED : at - data;
}

}  // namespace
}  // namespace gtopk

#define DEFINE(I, SUFFIX)                                                                        \
  GTOPK_API std::int64_t code_in_order_##SUFFIX(const std::uint8_t* indices, std::int64_t count, \
                                                std::int64_t length) {                           \
    return gtopk::dispatch([=]() __attribute__((always_inline)) {                                \
      return gtopk::in_order<I>(indices, count, length);                                         \
    });                                                                                          \
  }                                                                                              \
  GTOPK_API std::int64_t code_pack_blocks_##SUFFIX(const I* indices, std::int64_t count,         \
                                                   std::int64_t, std::uint8_t* out) {            \
    return gtopk::dispatch(                                                                      \
        [=]() __attribute__((always_inline)) { return gtopk::pack(indices, count, out); });      \
  }                                                                                              \
  GTOPK_API std::int64_t code_unpack_blocks_##SUFFIX(const std::uint8_t* data, std::int64_t size, \
                                                     std::int64_t count, std::int64_t length,    \
                                                     I* out) {                                   \
    return gtopk::dispatch([=]() __attribute__((always_inline)) {                                \
      return gtopk::unpack(data, size, count, length, out);                                      \
    });                                                                                          \
  }
DEFINE(std::int32_t, i32)
DEFINE(std::int64_t, i64)
