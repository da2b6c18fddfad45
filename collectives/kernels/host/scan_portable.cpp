// The scan without intrinsics, in a form that compilers vectorize.
#include "scan.hpp"

namespace gtopk {
namespace {

constexpr std::size_t STRIDE = 32;

template <class T>
std::size_t scan_portable(T* dense, const T* before, const T* addend, std::size_t count,
                          Key<T> floor, bool, std::uint32_t* offsets) {
  std::size_t found = 0, i = 0;
  for (; i + STRIDE <= count; i += STRIDE) {
    T* const block = dense + i;
    if (addend) {
      for (std::size_t j = 0; j < STRIDE; j++) block[j] = before[i + j] + addend[i + j];
    }
    Key<T> hits = 0;
    for (std::size_t j = 0; j < STRIDE; j++) hits |= -static_cast<Key<T>>(key(block[j]) > floor);
    if (hits) found = scan_one_by_one<T>(dense, dense, nullptr, i, i + STRIDE, floor, offsets, found);
  }
  return scan_one_by_one(dense, before, addend, i, count, floor, offsets, found);
}

void widen_portable(const std::uint16_t* halves, std::size_t count, float* into) {
  for (std::size_t i = 0; i < count; i++) into[i] = from_float16(halves[i]);
}

}  // namespace

const Instructions portable = {"portable", scan_portable<float>, scan_portable<double>,
                               widen_portable, filter_one_by_one<float, std::int32_t>};

}  // namespace gtopk
