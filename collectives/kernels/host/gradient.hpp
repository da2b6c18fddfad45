// Gradient: the blocks to add to the residual, read from one array or many.
//
//   arrays     |   0   |          1          |2|       3     |       one for each parameter
//   residual   |---------------------------------------------|       one flat vector
//   blocks     |   .   .   .   .   .   .   .   .   .   .   . |
//                  ^                   ^         a block that spans arrays, or is of 16 bits or
//                                                weighted, is first copied, within the L1 cache
#pragma once

#include <algorithm>

#include "scan.hpp"

namespace gtopk {

constexpr std::int64_t BLOCK = 1 << 11;

enum class Format : std::int32_t { SAME, FLOAT16, BFLOAT16 };

// A gradient's arrays, weight and velocity (null without momentum). The new velocity is written to
// `moved`, which may be the same array.
template <class T>
struct Gradient {
  const void* const* arrays;
  const std::int64_t* lengths;
  Format format;
  T weight;
  const T* velocity;
  T* moved;
  T momentum;
};

// Reads the blocks of a contiguous part, in ascending order.
template <class T>
class GradientBlocks {
 public:
  explicit GradientBlocks(const Gradient<T>& gradient) : gradient_(gradient) {}

  // Return the addends for the residual from `start` on; updates the velocity.
  const T* next(std::int64_t start, std::int64_t count) {
    const T* addend = weighted(direct(start, count), count);
    if (gradient_.velocity == nullptr) return addend;
    const T* const velocity = gradient_.velocity + start;
    T* const moved = gradient_.moved + start;
    for (std::int64_t i = 0; i < count; i++) {
      moved[i] = velocity[i] * gradient_.momentum + addend[i];
    }
    return moved;
  }

 private:
  const T* weighted(const T* addend, std::int64_t count) {
    if (gradient_.weight == 1) return addend;
    for (std::int64_t i = 0; i < count; i++) copy_[i] = addend[i] * gradient_.weight;
    return copy_;
  }

  const T* direct(std::int64_t start, std::int64_t count) {
    seek(start);
    if (gradient_.format == Format::SAME && start + count <= begin_ + gradient_.lengths[at_]) {
      return static_cast<const T*>(gradient_.arrays[at_]) + (start - begin_);
    }
    for (std::int64_t copied = 0; copied < count;) {
      seek(start + copied);
      const std::int64_t offset = start + copied - begin_;
      const std::int64_t length = std::min(count - copied, gradient_.lengths[at_] - offset);
      read(gradient_.arrays[at_], offset, length, copy_ + copied);
      copied += length;
    }
    return copy_;
  }

  void seek(std::int64_t position) {
    while (position >= begin_ + gradient_.lengths[at_]) begin_ += gradient_.lengths[at_++];
  }

  static void widen(const std::uint16_t* halves, std::int64_t length, float* into) {
    instructions().widen(halves, static_cast<std::size_t>(length), into);
  }
  static void widen(const std::uint16_t*, std::int64_t, double*) {}  // Python refuses these

  void read(const void* array, std::int64_t offset, std::int64_t length, T* into) const {
    const auto* halves = static_cast<const std::uint16_t*>(array) + offset;
    switch (gradient_.format) {
      case Format::SAME:
        std::copy_n(static_cast<const T*>(array) + offset, length, into);
        break;
      case Format::FLOAT16:
        widen(halves, length, into);
        break;
      case Format::BFLOAT16:
        for (std::int64_t i = 0; i < length; i++) into[i] = from_bfloat16(halves[i]);
        break;
    }
  }

  const Gradient<T> gradient_;
  std::int64_t at_ = 0, begin_ = 0;
  T copy_[BLOCK];
};

}  // namespace gtopk
