// checksum: 64 bits for any bytes, as defined in reference.py.
#include "abi.hpp"
#include "code.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gtopk {
namespace {

constexpr std::int64_t BLOCK_WORDS = 512;
constexpr std::uint64_t STEP = 0x9E3779B97F4A7C15;

constexpr std::uint64_t mix(std::uint64_t number) {
  number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9;
  number = (number ^ (number >> 27)) * 0x94D049BB133111EB;
  return number ^ (number >> 31);
}

struct Keys {
  alignas(64) std::uint64_t of[BLOCK_WORDS];
};

constexpr Keys make_keys() {
  Keys keys{};
  for (std::int64_t i = 0; i < BLOCK_WORDS; i++) keys.of[i] = mix((i + 1) * STEP);
  return keys;
}

constexpr Keys KEYS = make_keys();

inline std::uint64_t product(std::uint64_t word, std::uint64_t key) {
  const std::uint32_t low = static_cast<std::uint32_t>(word) + static_cast<std::uint32_t>(key);
  const std::uint32_t high =
      static_cast<std::uint32_t>(word >> 32) + static_cast<std::uint32_t>(key >> 32);
  return std::uint64_t{low} * high;
}

std::uint64_t sum_portable(const std::uint8_t* data, std::int64_t words) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < words; i++) {
    sum += product(load<std::uint64_t>(data + 8 * i), KEYS.of[i]);
  }
  return sum;
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) std::uint64_t sum_avx2(const std::uint8_t* data,
                                                       std::int64_t words) {
  constexpr int LANES = 4;
  __m256i sums[LANES] = {};
  std::int64_t i = 0;
  for (; i + 4 * LANES <= words; i += 4 * LANES) {
    for (int lane = 0; lane < LANES; lane++) {
      const auto* word = reinterpret_cast<const __m256i*>(data + 8 * i) + lane;
      const auto* key = reinterpret_cast<const __m256i*>(KEYS.of + i) + lane;
      const __m256i keyed = _mm256_add_epi32(_mm256_loadu_si256(word), _mm256_load_si256(key));
      const __m256i both = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
      sums[lane] = _mm256_add_epi64(sums[lane], both);
    }
  }
  const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(sums[0], sums[1]),
                                       _mm256_add_epi64(sums[2], sums[3]));
  std::uint64_t parts[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(parts), sum);
  std::uint64_t total = parts[0] + parts[1] + parts[2] + parts[3];
  for (; i < words; i++) total += product(load<std::uint64_t>(data + 8 * i), KEYS.of[i]);
  return total;
}
#endif

std::uint64_t sum(const std::uint8_t* data, std::int64_t words) {
#if defined(__x86_64__)
  if (&instructions() != &portable) return sum_avx2(data, words);
#endif
  return sum_portable(data, words);
}

std::uint64_t checksum(const std::uint8_t* data, std::int64_t size, std::uint64_t seed) {
  std::uint64_t total = seed + static_cast<std::uint64_t>(size);
  std::int64_t at = 0;
  for (; at + 8 * BLOCK_WORDS <= size; at += 8 * BLOCK_WORDS) {
    total = (total + sum(data + at, BLOCK_WORDS)) * STEP;
  }
  if (at < size) {
    const std::int64_t words = (size - at) / 8, rest = (size - at) % 8;
    std::uint64_t block = sum(data + at, words);
    if (rest) {
      std::uint64_t last = 0;
      std::memcpy(&last, data + at + 8 * words, rest);
      block += product(last, KEYS.of[words]);
    }
    total = (total + block) * STEP;
  }
  return mix(total);
}

}  // namespace
}  // namespace gtopk

GTOPK_API std::uint64_t code_checksum(const std::uint8_t* data, std::int64_t size,
                                      std::uint64_t seed) {
  return gtopk::checksum(data, size, seed);
}
