// rice: indices <-> Rice codes of their gaps, in the bytes of reference_indices.py.
#include <algorithm>
#include <type_traits>

#include "abi.hpp"
#include "code.hpp"

namespace gtopk {
namespace {

constexpr std::int64_t GROUP = 64;
constexpr std::uint64_t ESCAPE = 16;
constexpr int WIDEST = 52;

constexpr std::int64_t words_of(std::int64_t bits) { return (bits + 63) / 64; }

// The type of gaps, quotients and escapes: unsigned, as wide as an index.
template <class I>
using Gap = std::make_unsigned_t<I>;

// Up to GROUP gaps, padded with zeros.
template <class I>
struct Group {
  Gap<I> gaps[GROUP];
  std::int64_t size;

  GTOPK_INLINE Group(const I* indices, std::int64_t count, std::int64_t from)
      : size(std::min(GROUP, count - from)) {
    gaps[0] = indices[from] - (from ? indices[from - 1] : -1) - 1;
    for (std::int64_t i = 1; i < size; i++) gaps[i] = indices[from + i] - indices[from + i - 1] - 1;
    for (std::int64_t i = size; i < GROUP; i++) gaps[i] = 0;
  }

  // The bits at a width, without the ones that end the quotients; unary: how many are unary.
  GTOPK_INLINE std::uint64_t cost(int width, std::uint64_t& unary) const {
    Gap<I> total = 0, escapes = 0;
    for (std::int64_t i = 0; i < GROUP; i++) {
      const Gap<I> quotient = gaps[i] >> width;
      total += std::min<Gap<I>>(quotient, ESCAPE);
      escapes += quotient >= ESCAPE;
    }
    unary = total;
    return size * width + total + 8 * sizeof(I) * escapes;
  }

  // The bit length of the mean, or less while that saves bits.
  GTOPK_INLINE int width(std::uint64_t& unary) const {
    std::uint64_t sum = 0;
    for (std::int64_t i = 0; i < GROUP; i++) sum += gaps[i];
    const std::uint64_t mean = sum / size;
    int best = mean ? std::min(64 - __builtin_clzll(mean), WIDEST) : 0;
    std::uint64_t least = cost(best, unary), narrower;
    while (best > 0) {
      const std::uint64_t bits = cost(best - 1, narrower);
      if (bits >= least) break;
      least = bits;
      unary = narrower;
      best--;
    }
    return best;
  }
};

// Writes bits one after another, the first lowest, in 64-bit words.
class Bits {
 public:
  explicit Bits(std::uint8_t* out) : out_(out) {}

  GTOPK_INLINE void put(std::uint64_t bits, int width) {
    word_ |= bits << used_;
    used_ += width;
    if (used_ >= 64) {
      flush();
      used_ -= 64;
      word_ = used_ ? bits >> (width - used_) : 0;
    }
  }
  GTOPK_INLINE void end_word() {
    if (used_) flush();
    used_ = 0;
    word_ = 0;
  }

 private:
  GTOPK_INLINE void flush() {
    store(out_, word_);
    out_ += 8;
  }

  std::uint8_t* out_;
  std::uint64_t word_ = 0;
  int used_ = 0;
};

template <class I>
GTOPK_INLINE std::int64_t pack(const I* indices, std::int64_t count, std::uint8_t* out) {
  const std::int64_t groups = (count + GROUP - 1) / GROUP;
  std::uint8_t* const widths = out;
  std::int64_t rest_words = 0, unary_bits = count;
  for (std::int64_t g = 0; g < groups; g++) {
    const Group<I> group(indices, count, g * GROUP);
    std::uint64_t unary;
    const int width = group.width(unary);
    widths[g] = static_cast<std::uint8_t>(width);
    rest_words += words_of(group.size * width);
    unary_bits += unary;
  }
  const std::int64_t width_bytes = 8 * words_of(8 * groups);
  std::fill(widths + groups, widths + width_bytes, 0);

  std::uint8_t* const unary_at = widths + width_bytes + 8 * rest_words;
  std::uint8_t* const escapes_at = unary_at + 8 * words_of(unary_bits);
  std::uint8_t* escape = escapes_at;
  Bits rests(widths + width_bytes), unary(unary_at);
  for (std::int64_t g = 0; g < groups; g++) {
    const Group<I> group(indices, count, g * GROUP);
    const int width = widths[g];
    const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
    for (std::int64_t i = 0; i < group.size; i++) {
      const std::uint64_t gap = group.gaps[i], quotient = gap >> width;
      rests.put(gap & mask, width);
      if (__builtin_expect(quotient < ESCAPE, 1)) {
        unary.put(std::uint64_t{1} << quotient, static_cast<int>(quotient) + 1);
      } else {
        unary.put(std::uint64_t{1} << ESCAPE, ESCAPE + 1);
        store(escape, static_cast<Gap<I>>(quotient - ESCAPE));
        escape += sizeof(I);
      }
    }
    rests.end_word();
  }
  unary.end_word();
  while ((escape - escapes_at) % 8) *escape++ = 0;
  return escape - out;
}

// Reads quotients from unary words, which must have a one for each of them.
class Unary {
 public:
  explicit Unary(const std::uint8_t* words) : at_(words), word_(load<std::uint64_t>(words)) {}

  GTOPK_INLINE std::uint64_t next() {
    std::uint64_t zeros = 0;
    while (word_ == 0) {
      zeros += left_;
      left_ = 64;
      word_ = load<std::uint64_t>(at_ += 8);
    }
    const int more = __builtin_ctzll(word_);
    left_ -= more + 1;
    word_ = word_ >> more >> 1;
    return zeros + more;
  }

 private:
  const std::uint8_t* at_;
  std::uint64_t word_;
  int left_ = 64;  // bits of the word not yet read
};

// Returns how many words have exactly `count` ones; 0 if there is no such number.
GTOPK_INLINE std::int64_t unary_words(const std::uint8_t* data, std::int64_t words,
                                      std::int64_t count) {
  std::int64_t ones = 0, word = 0;
  while (ones < count && word < words) {
    ones += __builtin_popcountll(load<std::uint64_t>(data + 8 * word++));
  }
  return ones == count ? word : 0;
}

// Whether all bits from `bit` of a word on are zero.
GTOPK_INLINE bool zeros_from(const std::uint8_t* word, int bit) {
  return bit == 0 || load<std::uint64_t>(word) >> bit == 0;
}

// Returns the bytes taken, or MALFORMED.
template <class I>
GTOPK_INLINE std::int64_t unpack(const std::uint8_t* data, std::int64_t size, std::int64_t count,
                                 std::int64_t signed_length, I* out) {
  if (count == 0) return 0;
  const auto length = static_cast<std::uint64_t>(signed_length);
  const std::int64_t groups = (count + GROUP - 1) / GROUP, words = size / 8;
  const std::int64_t last_size = count - (groups - 1) * GROUP;
  std::int64_t word = words_of(8 * groups);
  if (words < word) return MALFORMED;
  std::int64_t rest_words = 0;
  std::uint8_t widest = 0;
  for (std::int64_t g = 0; g < groups - 1; g++) {
    rest_words += data[g];
    widest = std::max(widest, data[g]);
  }
  const int last_bits = static_cast<int>(last_size) * data[groups - 1];
  if (std::max(widest, data[groups - 1]) > WIDEST) return MALFORMED;
  for (std::int64_t g = groups; g < 8 * word; g++) {
    if (data[g]) return MALFORMED;
  }

  const std::uint8_t* rests = data + 8 * word;
  word += rest_words + words_of(last_bits);
  if (words <= word || !zeros_from(data + 8 * word - 8, last_bits % 64)) return MALFORMED;
  const std::int64_t in_unary = unary_words(data + 8 * word, words - word, count);
  if (in_unary == 0) return MALFORMED;
  Unary unary(data + 8 * word);
  word += in_unary;
  const std::uint8_t* escape = data + 8 * word;
  const std::uint8_t* const escapes_end = data + size;

  std::uint64_t next = 0;  // the least possible next index
  for (std::int64_t g = 0; g < groups; g++) {
    const int width = data[g];
    const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
    const std::int64_t group_size = g < groups - 1 ? GROUP : last_size;
    I* const group = out + g * GROUP;
    std::uint64_t largest = 0;
    for (std::int64_t i = 0, bit = 0; i < group_size; i++, bit += width) {
      // These 8 bytes may reach into the unary words, of which there is at least one.
      const std::uint64_t rest = load<std::uint64_t>(rests + bit / 8) >> bit % 8 & mask;
      std::uint64_t quotient = unary.next();
      largest = std::max(largest, quotient);
      if (__builtin_expect(quotient == ESCAPE, 0)) {
        if (escapes_end - escape < static_cast<std::int64_t>(sizeof(I))) return MALFORMED;
        const std::uint64_t excess = load<Gap<I>>(escape);
        escape += sizeof(I);
        if (excess > length >> width) return MALFORMED;
        next += excess << width;
        if (next >= length) return MALFORMED;
      }
      next += (quotient << width) + rest;
      group[i] = static_cast<I>(next++);
    }
    if (largest > ESCAPE || next > length) return MALFORMED;
    rests += width * (GROUP / 8);
  }
  for (; (escape - data) % 8; escape++) {
    if (escape == escapes_end || *escape) return MALFORMED;
  }
  return escape - data;
}

}  // namespace
}  // namespace gtopk

#define DEFINE(I, SUFFIX)                                                                         \
  GTOPK_API std::int64_t code_pack_rice_##SUFFIX(const I* indices, std::int64_t count,            \
                                                 std::int64_t, std::uint8_t* out) {               \
    return gtopk::dispatch(                                                                       \
        [=]() __attribute__((always_inline)) { return gtopk::pack(indices, count, out); });       \
  }                                                                                               \
  GTOPK_API std::int64_t code_unpack_rice_##SUFFIX(const std::uint8_t* data, std::int64_t size,   \
                                                   std::int64_t count, std::int64_t length,       \
                                                   I* out) {                                      \
    return gtopk::dispatch([=]() __attribute__((always_inline)) {                                 \
      return gtopk::unpack(data, size, count, length, out);                                       \
    });                                                                                           \
  }
DEFINE(std::int32_t, i32)
DEFINE(std::int64_t, i64)
