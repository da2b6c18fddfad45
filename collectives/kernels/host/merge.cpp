// Merge: lists sorted by index become one; then the k largest, and the rest.
//
//   a  (1: 4.0) (5: 1.0) (7: -2.0)                 k = 2
//   b  (5: 2.5) (7:  2.0) (9: 0.5)
//      walks along both; the exact zero at 7 is dropped
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

// How far two walks have come, in either list.
struct Place {
  std::int64_t a, b;
};

// A walk along two lists from one place to another, which writes the sum's nonzero entries.
//
// No branch depends on the indices: of two sparse lists every guess would be a coin's.
template <class T, class I>
class Walk {
 public:
  Walk(const List<T, I>& a, const List<T, I>& b, Place from, Place to, I* indices, T* values)
      : a_(a), b_(b), at_(from), to_(to), indices_(indices), values_(values) {}

  // How many steps can be made before either list may be at its end.
  std::int64_t steps() const { return std::min(to_.a - at_.a, to_.b - at_.b); }

  void step() {
    const I of_a = a_.indices[at_.a], of_b = b_.indices[at_.b];
    const bool take_a = of_a <= of_b, take_b = of_b <= of_a;
    put(take_a ? of_a : of_b, masked(a_.values[at_.a], take_a) + masked(b_.values[at_.b], take_b));
    at_.a += take_a;
    at_.b += take_b;
  }

  // Walk to the end, and return how many entries there are.
  std::int64_t end() {
    while (steps() > 0) step();
    for (; at_.a < to_.a; at_.a++) put(a_.indices[at_.a], a_.values[at_.a]);
    for (; at_.b < to_.b; at_.b++) put(b_.indices[at_.b], b_.values[at_.b]);
    return count_;
  }

 private:
  void put(I index, T value) {
    indices_[count_] = index;
    values_[count_] = value;
    count_ += value != T(0);
  }

  const List<T, I> a_, b_;
  Place at_;
  const Place to_;
  I* const indices_;
  T* const values_;
  std::int64_t count_ = 0;
};

// Where a walk along both is after half of all entries, equal indices taken together.
template <class T, class I>
Place half_way(const List<T, I>& a, const List<T, I>& b) {
  const std::int64_t half = (a.count + b.count) / 2;
  std::int64_t least = std::max(half - b.count, std::int64_t{0}), most = std::min(half, a.count);
  while (least < most) {
    const std::int64_t middle = (least + most) / 2;
    const bool is_before = a.indices[middle] <= b.indices[half - middle - 1];
    (is_before ? least : most) = middle + is_before;
  }
  Place place{least, half - least};
  place.b += place.a > 0 && place.b < b.count && a.indices[place.a - 1] == b.indices[place.b];
  return place;
}

// Write the sum's nonzero entries, and return how many; room for a.count + b.count.
//
//   a  [ first ->  | second ->  ]     Two walks in turn: a walk's next step waits for the last
//   b  [ first -> | second ->   ]     one's, and not for the other walk's.
template <class T, class I>
std::int64_t add(const List<T, I>& a, const List<T, I>& b, I* indices, T* values) {
  const Place middle = half_way(a, b);
  const std::int64_t room = middle.a + middle.b;
  Walk<T, I> first(a, b, {0, 0}, middle, indices, values);
  Walk<T, I> second(a, b, middle, {a.count, b.count}, indices + room, values + room);
  while (const std::int64_t steps = std::min(first.steps(), second.steps())) {
    for (std::int64_t step = 0; step < steps; step++) {
      first.step();
      second.step();
    }
  }
  const std::int64_t found = first.end(), more = second.end();
  if (found < room) {
    std::copy_n(indices + room, more, indices + found);
    std::copy_n(values + room, more, values + found);
  }
  return found + more;
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
