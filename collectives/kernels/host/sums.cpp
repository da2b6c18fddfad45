// Whole vectors in one number: whether all is finite, and the squared norm.
#include <algorithm>
#include <vector>

#include "abi.hpp"
#include "keys.hpp"
#include "pool.hpp"

namespace gtopk {
namespace {

constexpr std::int64_t BLOCK = 1 << 12;

template <class T>
bool block_is_finite(const T* values, std::int64_t count) {
  Key<T> largest = 0;
  for (std::int64_t i = 0; i < count; i++) largest = std::max(largest, key(values[i]));
  return largest < INFINITE<T>;
}

// 16-bit floats; INFINITE_HALF: the bits of infinity in one of the two formats.
template <std::int16_t INFINITE_HALF>
struct Half {
  std::int16_t bits;
};

template <std::int16_t INFINITE_HALF>
bool block_is_finite(const Half<INFINITE_HALF>* values, std::int64_t count) {
  std::int16_t largest = 0;
  for (std::int64_t i = 0; i < count; i++) {
    largest = std::max(largest, static_cast<std::int16_t>(values[i].bits & 0x7fff));
  }
  return largest < INFINITE_HALF;
}

template <class T>
std::int64_t all_finite(const T* values, std::int64_t count) {
  for (std::int64_t start = 0; start < count; start += BLOCK) {
    if (!block_is_finite(values + start, std::min(BLOCK, count - start))) return 0;
  }
  return 1;
}

// The order of the additions is part of the contract (reference.py): LANES running sums for each
// chunk, added up from the first to the last, and the chunks likewise.
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
  GTOPK_API std::int64_t all_finite_##SUFFIX(const T* values, std::int64_t count) {             \
    return gtopk::all_finite(values, count);                                                    \
  }                                                                                             \
  GTOPK_API std::int64_t squared_norm_##SUFFIX(const T* values, std::int64_t count, int threads, \
                                               double* norm) {                                  \
    return gtopk::squared_norm(values, count, threads, norm);                                   \
  }
DEFINE(float, f32)
DEFINE(double, f64)

GTOPK_API std::int64_t all_finite_f16(const void* values, std::int64_t count) {
  return gtopk::all_finite(static_cast<const gtopk::Half<0x7c00>*>(values), count);
}
GTOPK_API std::int64_t all_finite_bf16(const void* values, std::int64_t count) {
  return gtopk::all_finite(static_cast<const gtopk::Half<0x7f80>*>(values), count);
}
