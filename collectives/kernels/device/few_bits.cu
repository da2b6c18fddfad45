// Values of a message as integers of 4, 3 or 2 bits with a scale for each 256 or 240 of them, and
// back, in the bytes of reference_values.py.
//
// launch: any number of blocks. To pack, a block takes the values of a scale at a time, strided; to
// unpack, a thread takes a value, strided.
//
//   values -> the largest -> scale -> integers, a byte each -> groups, a thread each
//             (shuffles)              (shared)                 (8 in BITS bytes; of int2 5 in a byte)
#include "block.cuh"

template <int BITS> constexpr u32 SCALED = BITS == 2 ? 240 : 256;  // values that share a scale
template <int BITS> constexpr u32 GROUP = BITS == 2 ? 5 : 8;  // integers that fill whole bytes
template <int BITS> constexpr u32 GROUP_BYTES = BITS == 2 ? 1 : BITS;
constexpr u32 SMALLEST_SCALE = 254, NO_SCALE = 255;

// Only for normal numbers, by writing the exponent's field.
template <class Real> static __device__ Real power_of_two(int exponent);
template <> __device__ float power_of_two<float>(int exponent) {
  return __uint_as_float((u32)(exponent + 127) << 23);
}
template <> __device__ double power_of_two<double>(int exponent) {
  return __longlong_as_double((long long)(exponent + 1023) << 52);
}

// 2^exponent as two factors, since it may be out of the type's range.
template <class Real> struct Factors {
  Real first, second;
  __device__ explicit Factors(int exponent)
      : first(power_of_two<Real>(exponent >> 1)),
        second(power_of_two<Real>(exponent - (exponent >> 1))) {}
  __device__ Real of(Real value) const { return multiplied(multiplied(value, first), second); }
};

// Round a small value to the nearest integer, ties to even.
static __device__ int rounded(float value) {
  const float shift = 12582912.0f;  // 1.5 * 2^23
  return (int)(__float_as_uint(added(value, shift)) - __float_as_uint(shift));
}
static __device__ int rounded(double value) {
  const double shift = 6755399441055744.0;  // 1.5 * 2^52
  return (int)(__double_as_longlong(added(value, shift)) - __double_as_longlong(shift));
}

// The largest key of the block's threads; returned to every thread.
static __device__ u64 block_largest(u64 key) {
  __shared__ u64 of_warp[WARPS];
  key = warp_largest(key);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = key;
  __syncthreads();
  for (u32 warp = 0; warp < WARPS; ++warp)
    if (of_warp[warp] > key) key = of_warp[warp];
  __syncthreads();
  return key;
}

// The byte that codes the scale of values with this largest |value|.
// finest: no scale is finer than 2^finest, the smallest positive number.
template <class Real, int BITS>
static __device__ u32 scale_byte(u64 largest, int exponent, int finest) {
  typedef Keys<Real> Of;
  if (largest == 0) return 0;
  if (largest >= Of::INFINITE) return NO_SCALE;
  u64 key = largest;
  int found = -(int)(Of::INFINITE >> Of::MANTISSA_BITS) / 2;
  if (!(key >> Of::MANTISSA_BITS)) {  // subnormal: scale it up to a normal number
    const int up = Of::MANTISSA_BITS + 1;
    key = Of::of(multiplied(Of::value((typename Of::Key)key), power_of_two<Real>(up)));
    found -= up;
  }
  found += (int)(key >> Of::MANTISSA_BITS);
  int places = 8 + (int)(key >> (Of::MANTISSA_BITS - 3) & 7);
  int shift = exponent - (found - (BITS + 2));
  if (shift > exponent - finest) {
    shift = exponent - finest;
    places = 8;
  }
  const u32 byte = 8 * shift + 15 - places;
  return byte < SMALLEST_SCALE ? byte : SMALLEST_SCALE;
}

// Return a group's bytes, the first lowest.
template <int BITS> static __device__ u32 packed_group(const signed char* integers) {
  u32 word = 0;
#pragma unroll
  for (int i = GROUP<BITS> - 1; i >= 0; --i)
    word = BITS == 2 ? 3 * word + (u32)(integers[i] + 1)
                     : word << BITS | ((u32)integers[i] & ((1 << BITS) - 1));
  return word;
}

// Return integer `at` of a message.
template <int BITS> static __device__ int unpacked(const u8* packed, u64 at) {
  if (BITS == 2) {
    u32 byte = packed[at / GROUP<BITS>];
    for (u32 i = (u32)(at % GROUP<BITS>); i; --i) byte /= 3;
    return (int)(byte % 3) - 1;
  }
  constexpr int HALF = 1 << (BITS - 1);
  const u64 bit = at * BITS;
  u32 word = packed[bit / 8];
  if (bit % 8 + BITS > 8) word |= (u32)packed[bit / 8 + 1] << 8;
  return (int)(((word >> bit % 8) & ((1 << BITS) - 1)) ^ HALF) - HALF;
}

template <class Real, int BITS>
__global__ __launch_bounds__(THREADS) void pack_few_bits(
    const Real* values_k, u64 k, int exponent, int finest, u8* scales_b, u8* packed) {
  constexpr int MOST = (1 << (BITS - 1)) - 1;
  __shared__ signed char integers[SCALED<BITS>];
  const u64 blocks = (k + SCALED<BITS> - 1) / SCALED<BITS>;
  const u64 size = (k * GROUP_BYTES<BITS> + GROUP<BITS> - 1) / GROUP<BITS>;
  for (u64 block = blockIdx.x; block < blocks; block += gridDim.x) {
    const u64 from = block * SCALED<BITS>;
    u64 largest = 0;
    for (u64 at = from + threadIdx.x; at < from + SCALED<BITS> && at < k; at += THREADS) {
      const u64 key = Keys<Real>::of(values_k[at]);
      if (key > largest) largest = key;
    }
    const u32 byte = scale_byte<Real, BITS>(block_largest(largest), exponent, finest);
    const Factors<Real> factors((int)(byte / 8) - exponent);
    const Real places = (Real)(15 - (int)(byte % 8));
    for (u32 at = threadIdx.x; at < SCALED<BITS>; at += THREADS) {
      int integer = 0;
      if (from + at < k && byte != NO_SCALE) {
        integer = rounded(divided(factors.of(values_k[from + at]), places));
        integer = integer > MOST ? MOST : integer < -MOST ? -MOST : integer;
      }
      integers[at] = (signed char)integer;
    }
    __syncthreads();
    for (u32 group = threadIdx.x; group < SCALED<BITS> / GROUP<BITS>; group += THREADS) {
      const u32 word = packed_group<BITS>(integers + group * GROUP<BITS>);
      const u64 to = (from / GROUP<BITS> + group) * GROUP_BYTES<BITS>;
#pragma unroll
      for (u32 i = 0; i < GROUP_BYTES<BITS>; ++i)
        if (to + i < size) packed[to + i] = (u8)(word >> 8 * i);
    }
    if (threadIdx.x == 0) scales_b[block] = (u8)byte;
    __syncthreads();
  }
}

template <class Real, int BITS>
__global__ __launch_bounds__(THREADS) void unpack_few_bits(
    const u8* scales_b, const u8* packed, u64 k, int exponent, Real* values_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const u32 byte = scales_b[at / SCALED<BITS>];
    const int integer = unpacked<BITS>(packed, at);
    const Factors<Real> factors(exponent - (int)(byte / 8));
    const Real value = factors.of((Real)(integer * (15 - (int)(byte % 8))));
    constexpr typename Keys<Real>::Key QUIET =
        Keys<Real>::INFINITE | (typename Keys<Real>::Key)1 << (Keys<Real>::MANTISSA_BITS - 1);
    values_k[at] = byte == NO_SCALE ? Keys<Real>::value(QUIET) : value;
  }
}
