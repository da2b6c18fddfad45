// Merge: lists sorted by index become one; then the k largest, and the rest.
//
//   a  (1: 4.0) (5: 1.0) (7: -2.0)                 k = 2
//   b  (5: 2.5) (7:  2.0) (9: 0.5)
//      one walk along both; the exact zero at 7 is dropped
//   =  (1: 4.0) (5: 3.5) | (9: 0.5)                kept | dropped
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "candidates.hpp"

namespace gtopk {
namespace {

template <class T, class I>
struct List {
  const I* indices;
  const T* values;
  std::int64_t count;
};

// The value, or 0.
template <class T>
T masked(T value, bool taken) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= -static_cast<Key<T>>(taken);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Write the sum's nonzero entries, and return how many; room for a.count + b.count.
//
// No branch depends on the indices: of two sparse lists every guess would be a coin's.
template <class T, class I>
std::int64_t add(const List<T, I>& a, const List<T, I>& b, I* indices, T* values) {
  std::int64_t at_a = 0, at_b = 0, count = 0;
  while (at_a < a.count && at_b < b.count) {
    const I of_a = a.indices[at_a], of_b = b.indices[at_b];
    const bool take_a = of_a <= of_b, take_b = of_b <= of_a;
    const T sum = masked(a.values[at_a], take_a) + masked(b.values[at_b], take_b);
    indices[count] = take_a ? of_a : of_b;
    values[count] = sum;
    count += sum != T(0);
    at_a += take_a;
    at_b += take_b;
  }
  const auto rest = [&](const List<T, I>& list, std::int64_t at) {
    for (; at < list.count; at++) {
      indices[count] = list.indices[at];
      values[count] = list.values[at];
      count += list.values[at] != T(0);
    }
  };
  rest(a, at_a);
  rest(b, at_b);
  return count;
}

// Write kept entries, then dropped ones, and return the number of both; *kept: of the first.
template <class T, class I>
std::int64_t merge(const List<T, I>& a, const List<T, I>& b, std::int64_t k, I* indices,
                   T* values, std::int64_t* kept) {
  return guarded([&]() -> std::int64_t {
    static thread_local Scratch<I> index_memory;
    static thread_local Scratch<T> value_memory;
    if (a.count + b.count <= k) return *kept = add(a, b, indices, values);
    I* const all_indices = index_memory.reserve(a.count + b.count);
    T* const all_values = value_memory.reserve(a.count + b.count);
    const std::int64_t count = add(a, b, all_indices, all_values);
    *kept = std::min(count, k);
    if (count <= k) {
      std::copy_n(all_indices, count, indices);
      std::copy_n(all_values, count, values);
      return count;
    }
    Cut<T> cut(k, Ranking<T>(all_values, count).at(k));
    std::int64_t place[2] = {k, 0};  // of the next one dropped, and kept
    for (std::int64_t i = 0; i < count; i++) {
      std::int64_t& at = place[cut.keeps(all_values[i])];
      indices[at] = all_indices[i];
      values[at] = all_values[i];
      at++;
    }
    return count;
  });
}

template <class T, class I>
struct Entry {
  I index;
  T value;
};

// Merge runs that are sorted by index, equal indices side by side: those of `a` before those of `b`.
//
//   a  [ front ->        <- back ]     Two walks, one from either end, wait for memory at the same
//   b  [ front ->        <- back ]     time; each takes so few entries that they do not meet.
template <class T, class I>
void merge_runs(const Entry<T, I>* a, const Entry<T, I>* a_end, const Entry<T, I>* b,
                const Entry<T, I>* b_end, Entry<T, I>* out) {
  Entry<T, I>* out_end = out + (a_end - a) + (b_end - b);
  while (const std::ptrdiff_t steps = std::min(a_end - a, b_end - b) / 2) {
    for (std::ptrdiff_t step = 0; step < steps; step++) {
      const bool take_b = b->index < a->index;
      *out++ = *(take_b ? b : a);
      b += take_b;
      a += !take_b;
      const bool take_a = b_end[-1].index < a_end[-1].index;
      *--out_end = (take_a ? a_end : b_end)[-1];
      a_end -= take_a;
      b_end -= !take_a;
    }
  }
  std::merge(a, a_end, b, b_end, out,
             [](const Entry<T, I>& x, const Entry<T, I>& y) { return x.index < y.index; });
}

// Write the sum of all lists, each index summed in the order of the lists; return how many entries
// are not zero. Lists are merged in pairs, equal indices side by side, and summed at the end.
template <class T, class I>
std::int64_t sum(const I* const* indices, const T* const* values, const std::int64_t* counts,
                 std::int64_t lists, I* out_indices, T* out_values) {
  return guarded([&]() -> std::int64_t {
    if (lists == 2) {
      return add<T, I>({indices[0], values[0], counts[0]}, {indices[1], values[1], counts[1]},
                       out_indices, out_values);
    }
    static thread_local Scratch<Entry<T, I>> memory[2];
    const std::int64_t total = std::accumulate(counts, counts + lists, std::int64_t{0});
    Entry<T, I>*runs = memory[0].reserve(total), *merged = memory[1].reserve(total);
    std::vector<std::int64_t> ends(1, 0);
    for (std::int64_t list = 0, at = 0; list < lists; list++) {
      for (std::int64_t i = 0; i < counts[list]; i++, at++) {
        runs[at] = {indices[list][i], values[list][i]};
      }
      ends.push_back(at);
    }
    while (ends.size() > 2) {
      std::vector<std::int64_t> fewer(1, 0);
      for (std::size_t pair = 0; pair + 1 < ends.size(); pair += 2) {
        const std::int64_t begin = ends[pair], middle = ends[pair + 1];
        const std::int64_t end = pair + 2 < ends.size() ? ends[pair + 2] : middle;
        merge_runs(runs + begin, runs + middle, runs + middle, runs + end, merged + begin);
        fewer.push_back(end);
      }
      std::swap(runs, merged);
      ends.swap(fewer);
    }
    std::int64_t count = 0;
    T sum = 0;
    for (std::int64_t i = 0; i < total; i++) {
      const bool goes_on = i > 0 && runs[i].index == runs[i - 1].index;
      count += !goes_on && sum != T(0);
      sum = masked(sum, goes_on) + runs[i].value;
      out_indices[count] = runs[i].index;
      out_values[count] = sum;
    }
    return count + (sum != T(0));
  });
}

}  // namespace
}  // namespace gtopk

#define DEFINE(T, I, SUFFIX)                                                                      \
  GTOPK_API std::int64_t merge_##SUFFIX(const I* a_indices, const T* a_values,                    \
                                        std::int64_t a_count, const I* b_indices,                 \
                                        const T* b_values, std::int64_t b_count, std::int64_t k,  \
                                        I* indices, T* values, std::int64_t* kept) {              \
    return gtopk::merge<T, I>({a_indices, a_values, a_count}, {b_indices, b_values, b_count}, k,  \
                              indices, values, kept);                                             \
  }                                                                                               \
  GTOPK_API std::int64_t sum_by_index_##SUFFIX(const I* const* indices, const T* const* values,   \
                                               const std::int64_t* counts, std::int64_t lists,    \
                                               I* out_indices, T* out_values) {                   \
    return gtopk::sum<T, I>(indices, values, counts, lists, out_indices, out_values);             \
  }
DEFINE(float, std::int32_t, f32_i32)
DEFINE(float, std::int64_t, f32_i64)
DEFINE(double, std::int32_t, f64_i32)
DEFINE(double, std::int64_t, f64_i64)
