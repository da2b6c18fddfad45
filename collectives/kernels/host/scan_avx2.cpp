// The scan with AVX2: four vectors at a time, one test for all of them.
#include "scan.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX2 __attribute__((target("avx2,bmi")))

namespace gtopk {
namespace {

AVX2 std::size_t scan_float(float* dense, const float* addend, std::size_t count,
                            std::int32_t floor, std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi32(LARGEST<float>), floors = _mm256_set1_epi32(floor);
  std::size_t found = 0, i = 0;
  for (; i + 32 <= count; i += 32) {
    __m256i hits[4];
    for (int v = 0; v < 4; v++) {
      __m256 x = _mm256_loadu_ps(dense + i + 8 * v);
      if (addend) {
        x = _mm256_add_ps(x, _mm256_loadu_ps(addend + i + 8 * v));
        _mm256_storeu_ps(dense + i + 8 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi32(_mm256_and_si256(_mm256_castps_si256(x), sign), floors);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hits[0], hits[1]),
                                        _mm256_or_si256(hits[2], hits[3]));
    if (__builtin_expect(_mm256_testz_si256(any, any), 1)) continue;
    std::uint32_t mask = 0;
    for (int v = 0; v < 4; v++) {
      mask |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(hits[v])))
              << 8 * v;
    }
    for (; mask; mask &= mask - 1) {
      offsets[found++] = static_cast<std::uint32_t>(i) + __builtin_ctz(mask);
    }
  }
  return scan_one_by_one(dense, addend, i, count, floor, offsets, found);
}

AVX2 std::size_t scan_double(double* dense, const double* addend, std::size_t count,
                             std::int64_t floor, std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi64x(LARGEST<double>), floors = _mm256_set1_epi64x(floor);
  std::size_t found = 0, i = 0;
  for (; i + 16 <= count; i += 16) {
    __m256i hits[4];
    for (int v = 0; v < 4; v++) {
      __m256d x = _mm256_loadu_pd(dense + i + 4 * v);
      if (addend) {
        x = _mm256_add_pd(x, _mm256_loadu_pd(addend + i + 4 * v));
        _mm256_storeu_pd(dense + i + 4 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi64(_mm256_and_si256(_mm256_castpd_si256(x), sign), floors);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hits[0], hits[1]),
                                        _mm256_or_si256(hits[2], hits[3]));
    if (__builtin_expect(_mm256_testz_si256(any, any), 1)) continue;
    std::uint32_t mask = 0;
    for (int v = 0; v < 4; v++) {
      mask |= static_cast<std::uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(hits[v])))
              << 4 * v;
    }
    for (; mask; mask &= mask - 1) {
      offsets[found++] = static_cast<std::uint32_t>(i) + __builtin_ctz(mask);
    }
  }
  return scan_one_by_one(dense, addend, i, count, floor, offsets, found);
}

}  // namespace

const Instructions avx2 = {"AVX2", scan_float, scan_double};

}  // namespace gtopk
#endif
