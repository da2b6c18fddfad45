// The scan with AVX2: four vectors at a time, one test for all of them.
#include "scan.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,popcnt")))

namespace gtopk {
namespace {

// For each mask of eight lanes the numbers of those that are set: a table for AVX-512's compress.
struct Lanes {
  std::uint8_t of[256][8];
  constexpr Lanes() : of{} {
    for (int mask = 0; mask < 256; mask++) {
      int found = 0;
      for (int lane = 0; lane < 8; lane++) {
        if (mask >> lane & 1) of[mask][found++] = static_cast<std::uint8_t>(lane);
      }
    }
  }
};
constexpr Lanes LANES;

AVX2 inline __m256i lanes(int mask) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(LANES.of[mask])));
}

AVX2 inline std::size_t emit(int mask, std::size_t start, std::uint32_t* offsets,
                             std::size_t found) {
  const __m256i all = _mm256_add_epi32(lanes(mask), _mm256_set1_epi32(static_cast<int>(start)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets + found), all);
  return found + static_cast<std::size_t>(__builtin_popcount(static_cast<unsigned>(mask)));
}

AVX2 std::size_t scan_float(float* dense, const float* before, const float* addend,
                            std::size_t count, std::int32_t floor, bool many,
                            std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi32(LARGEST<float>), floors = _mm256_set1_epi32(floor);
  std::size_t found = 0, i = 0;
  for (; i + 32 <= count; i += 32) {
    __m256i hits[4];
    for (int v = 0; v < 4; v++) {
      __m256 x = _mm256_loadu_ps(before + i + 8 * v);
      if (addend) {
        x = _mm256_add_ps(x, _mm256_loadu_ps(addend + i + 8 * v));
        _mm256_storeu_ps(dense + i + 8 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(x), sign), floors);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hits[0], hits[1]),
                                        _mm256_or_si256(hits[2], hits[3]));
    if (!many && _mm256_testz_si256(any, any)) continue;
    for (int v = 0; v < 4; v++) {
      const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(hits[v]));
      found = emit(mask, i + 8 * v, offsets, found);
    }
  }
  return scan_one_by_one(dense, before, addend, i, count, floor, offsets, found);
}

AVX2 std::size_t scan_double(double* dense, const double* before, const double* addend,
                             std::size_t count, std::int64_t floor, bool many,
                             std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi64x(LARGEST<double>), floors = _mm256_set1_epi64x(floor);
  std::size_t found = 0, i = 0;
  for (; i + 16 <= count; i += 16) {
    __m256i hits[4];
    for (int v = 0; v < 4; v++) {
      __m256d x = _mm256_loadu_pd(before + i + 4 * v);
      if (addend) {
        x = _mm256_add_pd(x, _mm256_loadu_pd(addend + i + 4 * v));
        _mm256_storeu_pd(dense + i + 4 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi64(_mm256_and_si256(_mm256_castpd_si256(x), sign), floors);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hits[0], hits[1]),
                                        _mm256_or_si256(hits[2], hits[3]));
    if (!many && _mm256_testz_si256(any, any)) continue;
    for (int v = 0; v < 4; v += 2) {
      const int low = _mm256_movemask_pd(_mm256_castsi256_pd(hits[v]));
      const int high = _mm256_movemask_pd(_mm256_castsi256_pd(hits[v + 1]));
      found = emit(low | high << 4, i + 4 * v, offsets, found);
    }
  }
  return scan_one_by_one(dense, before, addend, i, count, floor, offsets, found);
}

}  // namespace

AVX2 void filter_avx2(const std::int32_t* indices, const float* values, std::int64_t count,
                      std::int32_t floor, Output<float, std::int32_t>& output) {
  const __m256i sign = _mm256_set1_epi32(LARGEST<float>), floors = _mm256_set1_epi32(floor);
  Output<float, std::int32_t> to = output;  // in registers
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(indices + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + i));
    const __m256i above = _mm256_cmpgt_epi32(_mm256_and_si256(y, sign), floors);
    const int mask = _mm256_movemask_ps(_mm256_castsi256_ps(above));
    const __m256i order = lanes(mask);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.indices + to.count),
                        _mm256_permutevar8x32_epi32(x, order));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.values + to.count),
                        _mm256_permutevar8x32_epi32(y, order));
    to.count += __builtin_popcount(static_cast<unsigned>(mask));
  }
  output = to;
  filter_one_by_one(indices + i, values + i, count - i, floor, output);
}

__attribute__((target("f16c"))) void widen_f16c(const std::uint16_t* halves, std::size_t count,
                                                float* into) {
  std::size_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m128i eight = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i));
    _mm256_storeu_ps(into + i, _mm256_cvtph_ps(eight));
  }
  for (; i < count; i++) into[i] = from_float16(halves[i]);
}

const Instructions avx2 = {"AVX2", scan_float, scan_double, widen_f16c, filter_avx2};

}  // namespace gtopk
#endif
