// Reductions of dense vectors: whether all elements are finite, and the squared norm.
#include <algorithm>
#include <vector>

#include "abi.hpp"
#include "keys.hpp"
#include "pool.hpp"

namespace gtopk {
namespace {

// A block is read in four streams at once, as a single one does not use all of a core's bandwidth.
constexpr std::int64_t FINITE_BLOCK = 1 << 16;
constexpr int STREAMS = 4;

// infinity: its bits. Adding SIGN - infinity to a magnitude's bits sets the sign bit if it is at
// least infinity.
template <class Bits>
std::int64_t all_finite(const Bits* values, std::int64_t count, Bits infinity) {
  constexpr Bits SIGN = Bits{1} << (8 * sizeof(Bits) - 1);
  const Bits magnitude = SIGN - 1, carry = SIGN - infinity;
  const auto reaches = [=](Bits bits) { return static_cast<Bits>((bits & magnitude) + carry); };
  for (std::int64_t start = 0; start < count; start += FINITE_BLOCK) {
    const Bits* const block = values + start;
    const std::int64_t length = std::min(FINITE_BLOCK, count - start), part = length / STREAMS;
    Bits reached[STREAMS] = {};
    for (std::int64_t i = 0; i < part; i++) {
      for (int s = 0; s < STREAMS; s++) reached[s] |= reaches(block[s * part + i]);
    }
    for (std::int64_t i = STREAMS * part; i < length; i++) reached[0] |= reaches(block[i]);
    for (Bits bits : reached) {
      if (bits & SIGN) return 0;
    }
  }
  return 1;
}

// The order of additions is that of reference.py: LANES running sums for each chunk, added up from
// first to last; then the chunks, likewise.
constexpr std::int64_t CHUNK = 1 << 16;
constexpr int LANES = 16;

template <class T>
double chunk_squared(const T* values, std::int64_t count) {
  double lanes[LANES] = {};
  std::int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int lane = 0; lane < LANES; lane++) {
      const double value = values[i + lane];
      lanes[lane] += value * value;
    }
  }
  for (int lane = 0; i < count; i++, lane++) {
    const double value = values[i];
    lanes[lane] += value * value;
  }
  double total = 0;
  for (double lane : lanes) total += lane;
  return total;
}

template <class T>
std::int64_t squared_norm(const T* values, std::int64_t count, int threads, double* norm) {
  return guarded([&]() -> std::int64_t {
    std::vector<double> chunks((count + CHUNK - 1) / CHUNK);
    in_parallel(threads, chunks.size(), [&](int, std::int64_t begin, std::int64_t end) {
      for (std::int64_t chunk = begin; chunk < end; chunk++) {
        const std::int64_t start = chunk * CHUNK;
        chunks[chunk] = chunk_squared(values + start, std::min(CHUNK, count - start));
      }
    });
    *norm = 0;
    for (double chunk : chunks) *norm += chunk;
    return 0;
  });
}

}  // namespace
}  // namespace gtopk

#define DEFINE(T, SUFFIX)                                                                       \
  GTOPK_API std::int64_t squared_norm_##SUFFIX(const T* values, std::int64_t count, int threads, \
                                               double* norm) {                                  \
    return gtopk::squared_norm(values, count, threads, norm);                                   \
  }
DEFINE(float, f32)
DEFINE(double, f64)

GTOPK_API std::int64_t all_finite_f32(const void* values, std::int64_t count) {
  return gtopk::all_finite<std::uint32_t>(static_cast<const std::uint32_t*>(values), count,
                                          gtopk::INFINITE<float>);
}
GTOPK_API std::int64_t all_finite_f64(const void* values, std::int64_t count) {
  return gtopk::all_finite<std::uint64_t>(static_cast<const std::uint64_t*>(values), count,
                                          gtopk::INFINITE<double>);
}
GTOPK_API std::int64_t all_finite_f16(const void* values, std::int64_t count) {
  return gtopk::all_finite<std::uint16_t>(static_cast<const std::uint16_t*>(values), count, 0x7c00);
}
GTOPK_API std::int64_t all_finite_bf16(const void* values, std::int64_t count) {
  return gtopk::all_finite<std::uint16_t>(static_cast<const std::uint16_t*>(values), count, 0x7f80);
}
