// Scatter: add to or clear entries of a dense vector, or clear all of it; search a list of indices.
#include <algorithm>

#include "abi.hpp"
#include "stream.hpp"

namespace gtopk {
namespace {

// Both lists are sorted: walk along both, or use binary search if `indices` is much longer.
template <class I>
void contains(const I* indices, std::int64_t count, const I* wanted, std::int64_t wanted_count,
              std::uint8_t* found) {
  constexpr std::int64_t MUCH_LONGER = 16;
  const I* at = indices;
  const I* const end = indices + count;
  if (count / MUCH_LONGER > wanted_count) {
    for (std::int64_t i = 0; i < wanted_count; i++) {
      at = std::lower_bound(at, end, wanted[i]);
      found[i] = at != end && *at == wanted[i];
    }
    return;
  }
  std::int64_t i = 0;
  while (i < wanted_count && at != end) {
    const I index = *at;
    found[i] = index == wanted[i];
    at += index <= wanted[i];
    i += index >= wanted[i];
  }
  std::fill(found + i, found + wanted_count, 0);
}

// Indices are sorted, so checking the two ends suffices.
template <class I>
bool inside(const I* indices, std::int64_t count, std::int64_t length) {
  return count == 0 || (indices[0] >= 0 && indices[count - 1] < length);
}

}  // namespace
}  // namespace gtopk

#define DEFINE_INDEX(I, SUFFIX)                                                                  \
  GTOPK_API std::int64_t contains_##SUFFIX(const I* indices, std::int64_t count, const I* wanted, \
                                           std::int64_t wanted_count, std::uint8_t* found) {     \
    gtopk::contains(indices, count, wanted, wanted_count, found);                                \
    return 0;                                                                                    \
  }
DEFINE_INDEX(std::int32_t, i32)
DEFINE_INDEX(std::int64_t, i64)

#define DEFINE(T, I, SUFFIX)                                                                   \
  GTOPK_API std::int64_t add_at_##SUFFIX(T* dense, std::int64_t length, const I* indices,      \
                                         const T* values, std::int64_t count) {                \
    if (!gtopk::inside(indices, count, length)) return 0;                                      \
    for (std::int64_t i = 0; i < count; i++) dense[indices[i]] += values[i];                   \
    return 1;                                                                                  \
  }                                                                                            \
  GTOPK_API std::int64_t clear_at_##SUFFIX(T* dense, std::int64_t length, const I* indices,    \
                                           std::int64_t count) {                               \
    if (!gtopk::inside(indices, count, length)) return 0;                                      \
    for (std::int64_t i = 0; i < count; i++) dense[indices[i]] = T(0);                         \
    return 1;                                                                                  \
  }
DEFINE(float, std::int32_t, f32_i32)
DEFINE(float, std::int64_t, f32_i64)
DEFINE(double, std::int32_t, f64_i32)
DEFINE(double, std::int64_t, f64_i64)

GTOPK_API void clear_bytes(char* dense, std::int64_t count) {
  if (count < gtopk::STREAMED_BYTES) {
    std::memset(dense, 0, count);
    return;
  }
  gtopk::stream(dense, nullptr, count);
  gtopk::end_stream();
}
