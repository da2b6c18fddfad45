// Numbers: |value| as an integer key, the 16-bit formats, and exactly rounded arithmetic, without
// CUDA's headers.
//
//   float   s eeeeeeee mmm...   key = the bits without s: ordered like |value|, infinity above
//                               every number, NaN above infinity, and 0 for both zeros
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

template <class Real> struct Keys;

template <> struct Keys<float> {
  typedef u32 Key;
  static constexpr int BITS = 31, MANTISSA_BITS = 23;
  static constexpr Key INFINITE = 0x7f800000u;
  static __device__ Key of(float value) { return __float_as_uint(value) & 0x7fffffffu; }
  static __device__ float value(Key key) { return __uint_as_float(key); }
};

template <> struct Keys<double> {
  typedef u64 Key;
  static constexpr int BITS = 63, MANTISSA_BITS = 52;
  static constexpr Key INFINITE = 0x7ff0000000000000ull;
  static __device__ Key of(double value) {
    return (u64)__double_as_longlong(value) & 0x7fffffffffffffffull;
  }
  static __device__ double value(Key key) { return __longlong_as_double((long long)key); }
};

struct Half {
  u16 bits;
};

struct Bfloat {
  u16 bits;
};

#ifdef __CUDACC__
static __device__ __forceinline__ float half_to_float(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
static __device__ __forceinline__ u16 float_to_half(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

static __device__ __forceinline__ u16 double_to_half(double value) {
  u16 bits;
  asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value));
  return bits;
}

// CuPy compiles with -ftz=true: operators and casts flush subnormal floats to zero. These do not.
static __device__ __forceinline__ float added(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
static __device__ __forceinline__ float multiplied(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
static __device__ __forceinline__ float divided(float a, float b) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
static __device__ __forceinline__ double in_double(float value) {
  double same;
  asm("cvt.f64.f32 %0, %1;" : "=d"(same) : "f"(value));
  return same;
}
static __device__ __forceinline__ void narrow_to(float& narrow, double value) {
  asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(value));
}
#endif  // other compilers' includer must define these

static __device__ __forceinline__ double added(double a, double b) { return a + b; }
static __device__ __forceinline__ double multiplied(double a, double b) { return a * b; }
static __device__ __forceinline__ double divided(double a, double b) { return a / b; }
static __device__ __forceinline__ double in_double(double value) { return value; }

static __device__ __forceinline__ float widened(float value) { return value; }
static __device__ __forceinline__ double widened(double value) { return value; }
static __device__ __forceinline__ float widened(Half value) { return half_to_float(value.bits); }
static __device__ __forceinline__ float widened(Bfloat value) {
  return __uint_as_float((u32)value.bits << 16);
}

static __device__ __forceinline__ void narrow_to(float& same, float value) { same = value; }
static __device__ __forceinline__ void narrow_to(double& same, double value) { same = value; }
static __device__ __forceinline__ void narrow_to(Half& narrow, float value) {
  narrow.bits = float_to_half(value);
}

// Round to nearest, ties to even; NaN stays NaN.
static __device__ __forceinline__ void narrow_to(Bfloat& narrow, float value) {
  const u32 bits = __float_as_uint(value);
  const bool nan = (bits & 0x7fffffffu) > Keys<float>::INFINITE;
  narrow.bits = (u16)((nan ? bits | 0x400000u : bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// As the reference rounds: a double to half directly, but to bfloat by way of a float.
static __device__ __forceinline__ void narrow_to(Half& narrow, double value) {
  narrow.bits = double_to_half(value);
}
static __device__ __forceinline__ void narrow_to(Bfloat& narrow, double value) {
  float single;
  narrow_to(single, value);
  narrow_to(narrow, single);
}

template <class Real> static __device__ __forceinline__ Real narrowed(double value) {
  Real narrow;
  narrow_to(narrow, value);
  return narrow;
}

// Four neighbours, loaded and stored by one instruction.
template <class T> struct alignas(sizeof(T) == 2 ? 8 : 16) Four {
  T at[4];
};

template <class T> __device__ __forceinline__ bool aligned(const T* array) {
  return ((u64)array & (alignof(Four<T>) - 1)) == 0;
}

// The four elements from `from` on; beyond the end the last one is repeated, to be masked by callers.
template <class T>
__device__ __forceinline__ Four<T> load(const T* array_n, u64 from, u64 n, bool whole) {
  if (whole) return *reinterpret_cast<const Four<T>*>(array_n + from);
  Four<T> four;
#pragma unroll
  for (int i = 0; i < 4; ++i) four.at[i] = array_n[from + i < n ? from + i : n - 1];
  return four;
}

template <class T>
__device__ __forceinline__ void store(T* array_n, u64 from, u64 n, bool whole, const Four<T>& four) {
  if (whole) {
    *reinterpret_cast<Four<T>*>(array_n + from) = four;
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (from + i < n) array_n[from + i] = four.at[i];
}
