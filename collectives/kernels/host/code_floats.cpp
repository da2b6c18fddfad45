// floats: values <-> 16-bit floats with one power of two, in the bytes of reference_values.py.
#include <type_traits>

#include "abi.hpp"
#include "scale.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gtopk {
namespace {

using Bits16 = std::uint16_t;
using Bits32 = std::uint32_t;

GTOPK_INLINE Bits16 to_bf16(float value) {
  const auto bits = load<Bits32>(&value);
  const Bits32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : static_cast<Bits16>(rounded);
}

// Round a float or double, whose exponent is at most 14 if it is finite, to an IEEE half.
template <class T>
GTOPK_INLINE Bits16 to_fp16(T value) {
  using U = std::make_unsigned_t<Key<T>>;
  constexpr int DIGITS = std::numeric_limits<T>::digits - 1, DROPPED = DIGITS - 10;
  constexpr int BIAS = std::numeric_limits<T>::max_exponent - 1;
  // Adding 2^(DIGITS - 24) rounds to the places that subnormal halves have.
  constexpr U SMALL = U{BIAS + DIGITS - 24} << DIGITS, NORMAL = U{BIAS - 14} << DIGITS;
  constexpr U REBIAS = U{BIAS - 15} << DIGITS;
  const auto bits = load<U>(&value);
  const U size = bits & static_cast<U>(LARGEST<T>);
  const auto sign = static_cast<Bits16>((bits ^ size) >> (8 * sizeof(T) - 16));
  const T sum = load<T>(&size) + load<T>(&SMALL);
  const U small = load<U>(&sum) - SMALL;
  const U normal = (size - REBIAS + (U{1} << (DROPPED - 1)) - 1 + (size >> DROPPED & 1)) >> DROPPED;
  const U finite = size < NORMAL ? small : normal;
  const auto infinite = static_cast<U>(INFINITE<T>);
  const U half = sign | (size < infinite ? finite : U{0x7C00});
  return static_cast<Bits16>(size > infinite ? U{0x7E00} : half);
}

// A code: the exponent of its largest values, the bits that values round up to beyond it, and the
// conversion of one value.
struct Bf16 {
  static constexpr int TOP = BF16_TOP;
  static constexpr Bits16 BEYOND = (TOP + 1 + 127) << 7;
  template <class T>
  static GTOPK_INLINE Bits16 to(T value) {
    return to_bf16(static_cast<float>(value));
  }
  static GTOPK_INLINE float from(Bits16 half) { return from_bfloat16(half); }
};

struct Fp16 {
  static constexpr int TOP = FP16_TOP;
  static constexpr Bits16 BEYOND = (TOP + 1 + 15) << 10;
  template <class T>
  static GTOPK_INLINE Bits16 to(T value) {
    return to_fp16(value);
  }
  static GTOPK_INLINE float from(Bits16 half) { return from_float16(half); }
};

template <class Code, class T>
GTOPK_INLINE void write(const T* values, std::int64_t count, Scale<T> scale, std::uint8_t* out) {
  for (std::int64_t i = 0; i < count; i++) store(out + 2 * i, Code::to(scale.of(values[i])));
}

template <class Code, class T>
GTOPK_INLINE void read(const std::uint8_t* data, std::int64_t count, Scale<T> scale, T* out) {
  for (std::int64_t i = 0; i < count; i++) {
    out[i] = scale.of(static_cast<T>(Code::from(load<Bits16>(data + 2 * i))));
  }
}

// By the processor's conversion instructions. They keep a NaN's bits, while `to` makes all NaNs
// alike, so `pack` uses them only for values without NaN.
#if defined(__x86_64__)
__attribute__((target("avx2,f16c"))) std::int64_t write_halves(const float* values,
                                                               std::int64_t count,
                                                               Scale<float> scale,
                                                               std::uint8_t* out) {
  const __m256 first = _mm256_set1_ps(scale.first), second = _mm256_set1_ps(scale.second);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 scaled = _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(values + i), first), second);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i), _mm256_cvtps_ph(scaled, 0));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) std::int64_t read_halves(const std::uint8_t* data,
                                                              std::int64_t count,
                                                              Scale<float> scale, float* out) {
  const __m256 first = _mm256_set1_ps(scale.first), second = _mm256_set1_ps(scale.second);
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const auto* halves = reinterpret_cast<const __m128i*>(data + 2 * i);
    const __m256 values = _mm256_cvtph_ps(_mm_loadu_si128(halves));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(values, first), second));
  }
  return i;
}
#endif

// Convert what the processor has instructions for, and return how many values those were.
template <class Code, class T>
GTOPK_INLINE std::int64_t write_natively(const T* values, std::int64_t count, Scale<T> scale,
                                         std::uint8_t* out) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Code, Fp16> && std::is_same_v<T, float>) {
    if (&instructions() != &portable) return write_halves(values, count, scale, out);
  }
#endif
  return 0;
}

template <class Code, class T>
GTOPK_INLINE std::int64_t read_natively(const std::uint8_t* data, std::int64_t count,
                                        Scale<T> scale, T* out) {
#if defined(__x86_64__)
  if constexpr (std::is_same_v<Code, Fp16> && std::is_same_v<T, float>) {
    if (&instructions() != &portable) return read_halves(data, count, scale, out);
  }
#endif
  return 0;
}

// Returns the exponent.
template <class Code, class T>
GTOPK_INLINE std::int64_t pack(const T* values, std::int64_t count, std::uint8_t* out) {
  const Key<T> largest = largest_key(values, count);
  const int highest = exponent_of<T>(largest), exponent = highest - Code::TOP;
  const Scale<T> scale(-exponent);
  const std::int64_t done =
      largest > INFINITE<T> ? 0 : write_natively<Code>(values, count, scale, out);
  write<Code>(values + done, count - done, scale, out + 2 * done);
  if (highest == std::numeric_limits<T>::max_exponent - 1) {
    for (std::int64_t i = 0; i < count; i++) {
      const auto half = load<Bits16>(out + 2 * i);
      if ((half & 0x7FFF) == Code::BEYOND) store(out + 2 * i, static_cast<Bits16>(half - 1));
    }
  }
  return exponent;
}

template <class Code, class T>
GTOPK_INLINE void unpack(const std::uint8_t* data, std::int64_t count, int exponent, T* out) {
  const Scale<T> scale(exponent);
  const std::int64_t done = read_natively<Code>(data, count, scale, out);
  read<Code>(data + 2 * done, count - done, scale, out + done);
}

}  // namespace
}  // namespace gtopk

#define DEFINE(NAME, CODE, T, SUFFIX)                                                             \
  GTOPK_API std::int64_t code_pack_##NAME##_##SUFFIX(const T* values, std::int64_t count,         \
                                                     std::uint8_t* out) {                         \
    return gtopk::dispatch([=]() __attribute__((always_inline)) {                                 \
      return gtopk::pack<gtopk::CODE>(values, count, out);                                        \
    });                                                                                           \
  }                                                                                               \
  GTOPK_API std::int64_t code_unpack_##NAME##_##SUFFIX(const std::uint8_t* data,                  \
                                                       std::int64_t count, std::int64_t exponent, \
                                                       T* out) {                                  \
    return gtopk::dispatch([=]() __attribute__((always_inline)) -> std::int64_t {                 \
      gtopk::unpack<gtopk::CODE>(data, count, static_cast<int>(exponent), out);                   \
      return 0;                                                                                   \
    });                                                                                           \
  }
DEFINE(bf16, Bf16, float, f32)
DEFINE(bf16, Bf16, double, f64)
DEFINE(fp16, Fp16, float, f32)
DEFINE(fp16, Fp16, double, f64)
