// The scan with AVX-512: comparisons give masks, and compress the offsets.
#include "scan.hpp"

#if defined(__x86_64__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512vl,popcnt")))

namespace gtopk {
namespace {

// Compress in a register, as compressing to memory is slow on some processors.
AVX512 inline std::size_t emit(unsigned mask, std::size_t start, std::uint32_t* offsets,
                               std::size_t found) {
  const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  const __m512i all = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(start)));
  const __m512i hits = _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), all);
  _mm512_storeu_si512(offsets + found, hits);
  return found + static_cast<std::size_t>(__builtin_popcount(mask));
}

// Vectors of half the width: arrays may begin anywhere, and if not aligned each full one would
// straddle two cache lines.
AVX512 std::size_t scan_float(float* dense, const float* before, const float* addend,
                              std::size_t count, std::int32_t floor, bool many,
                              std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi32(LARGEST<float>), floors = _mm256_set1_epi32(floor);
  std::size_t found = 0, i = 0;
  for (; i + 32 <= count; i += 32) {
    unsigned hits[4];
    for (int v = 0; v < 4; v++) {
      __m256 x = _mm256_loadu_ps(before + i + 8 * v);
      if (addend) {
        x = _mm256_add_ps(x, _mm256_loadu_ps(addend + i + 8 * v));
        _mm256_storeu_ps(dense + i + 8 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi32_mask(_mm256_and_si256(_mm256_castps_si256(x), sign), floors);
    }
    if (!many && (hits[0] | hits[1] | hits[2] | hits[3]) == 0) continue;
    for (int v = 0; v < 4; v += 2) {
      found = emit(hits[v] | hits[v + 1] << 8, i + 8 * v, offsets, found);
    }
  }
  return scan_one_by_one(dense, before, addend, i, count, floor, offsets, found);
}

AVX512 std::size_t scan_double(double* dense, const double* before, const double* addend,
                               std::size_t count, std::int64_t floor, bool many,
                               std::uint32_t* offsets) {
  const __m256i sign = _mm256_set1_epi64x(LARGEST<double>), floors = _mm256_set1_epi64x(floor);
  std::size_t found = 0, i = 0;
  for (; i + 16 <= count; i += 16) {
    unsigned hits[4];
    for (int v = 0; v < 4; v++) {
      __m256d x = _mm256_loadu_pd(before + i + 4 * v);
      if (addend) {
        x = _mm256_add_pd(x, _mm256_loadu_pd(addend + i + 4 * v));
        _mm256_storeu_pd(dense + i + 4 * v, x);
      }
      hits[v] = _mm256_cmpgt_epi64_mask(_mm256_and_si256(_mm256_castpd_si256(x), sign), floors);
    }
    const unsigned mask = hits[0] | hits[1] << 4 | hits[2] << 8 | hits[3] << 12;
    if (many || mask != 0) found = emit(mask, i, offsets, found);
  }
  return scan_one_by_one(dense, before, addend, i, count, floor, offsets, found);
}

}  // namespace

const Instructions avx512 = {"AVX-512", scan_float, scan_double, widen_f16c, filter_avx2};

}  // namespace gtopk
#endif
