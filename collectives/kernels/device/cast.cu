// Values of a message as 16-bit floats, scaled by one power of two, and back, in the bits of
// reference_values.py.
//
// launch: any number of blocks, a value a thread, strided.
//
//   value = 16-bit float * 2^exponent      as two factors: 2^exponent may be out of the type's range
#include "block.cuh"

template <class Narrow> struct Nan;
template <> struct Nan<Half> { static constexpr u16 BITS = 0x7e00; };
template <> struct Nan<Bfloat> { static constexpr u16 BITS = 0x7fc0; };

// beyond: the bits, without the sign, that rounding up may give but that would decode as infinity;
// the next smaller number is written instead. A value of more than 16 bits if there are none.
template <class Narrow, class Real>
__global__ __launch_bounds__(THREADS) void round_values(
    const Real* values_k, u64 k, Real first, Real second, u32 beyond, Narrow* narrow_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const Real value = values_k[at];
    Narrow narrow;
    narrow_to(narrow, multiplied(multiplied(value, first), second));
    if (Keys<Real>::of(value) > Keys<Real>::INFINITE) narrow.bits = Nan<Narrow>::BITS;
    if ((narrow.bits & 0x7fffu) == beyond) --narrow.bits;
    narrow_k[at] = narrow;
  }
}

template <class Narrow, class Real>
__global__ __launch_bounds__(THREADS) void widen_values(
    const Narrow* narrow_k, u64 k, Real first, Real second, Real* values_k) {
  for (u64 at = (u64)blockIdx.x * THREADS + threadIdx.x; at < k; at += (u64)gridDim.x * THREADS) {
    const Real value = narrowed<Real>(in_double(widened(narrow_k[at])));
    values_k[at] = multiplied(multiplied(value, first), second);
  }
}
