// Merge: add lists that are sorted by index; then keep the k largest.
//
//   a  (1: 4.0) (5: 1.0) (7: -2.0)                            k = 2
//   b  (5: 2.5) (7:  2.0) (9: 0.5)
//      interleave: one list, sorted by index
//   =  (1: 4.0) (5: 1.0) (5: 2.5) (7: -2.0) (7: 2.0) (9: 0.5)
//      add_neighbours: the first of two becomes their sum, the second zero
//   =  (1: 4.0) (5: 3.5) (5: 0.0) (7: 0.0) (7: 0.0) (9: 0.5)
//      filter: keep the k largest, and no zeros
//   =  (1: 4.0) (5: 3.5)
//
// No pass branches on the data: on sparse lists half of the branches would be mispredicted.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "candidates.hpp"
#include "scan.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace gtopk {
namespace {

template <class T, class I>
struct List {
  const I* indices;
  const T* values;
  std::int64_t count;

  List from(std::int64_t first) const { return {indices + first, values + first, count - first}; }
};

// second ? b : a, for which a compiler may emit a branch if the result is dereferenced.
template <class Element>
const Element* either(const Element* a, const Element* b, bool second) {
  const auto mask = -static_cast<std::uintptr_t>(second);
  return reinterpret_cast<const Element*>((reinterpret_cast<std::uintptr_t>(a) & ~mask) |
                                          (reinterpret_cast<std::uintptr_t>(b) & mask));
}

// Merge lists that are sorted by index; of equal indices that of `a` comes first.
//
//   a  [ front ->        <- back ]     Merging from both ends at once overlaps the latencies of two
//   b  [ front ->        <- back ]     independent chains. `steps` is so small that they never meet.
template <class T, class I>
void interleave_in_order(List<T, I> a, List<T, I> b, I* indices, T* values) {
  std::int64_t front = 0, back = a.count + b.count;
  while (const std::int64_t steps = std::min(a.count, b.count) / 2) {
    std::int64_t i = 0, j = 0, a_end = a.count, b_end = b.count;
    for (std::int64_t step = 0; step < steps; step++) {
      const bool take_b = b.indices[j] < a.indices[i];
      indices[front] = std::min(a.indices[i], b.indices[j]);
      values[front++] = *either(a.values + i, b.values + j, take_b);
      j += take_b;
      i += !take_b;
      const bool take_a = b.indices[b_end - 1] < a.indices[a_end - 1];
      indices[--back] = std::max(a.indices[a_end - 1], b.indices[b_end - 1]);
      values[back] = *either(b.values + b_end - 1, a.values + a_end - 1, take_a);
      a_end -= take_a;
      b_end -= !take_a;
    }
    a = List<T, I>{a.indices, a.values, a_end}.from(i);
    b = List<T, I>{b.indices, b.values, b_end}.from(j);
  }
  while (a.count > 0 && b.count > 0) {
    List<T, I>& next = *b.indices < *a.indices ? b : a;
    indices[front] = *next.indices;
    values[front++] = *next.values;
    next = next.from(1);
  }
  const List<T, I>& rest = a.count > 0 ? a : b;
  std::copy_n(rest.indices, rest.count, indices + front);
  std::copy_n(rest.values, rest.count, values + front);
}

// The same, but equal indices may come in any order, as in a sum of two.
template <class T, class I>
void interleave(List<T, I> a, List<T, I> b, I* indices, T* values) {
  interleave_in_order(a, b, indices, values);
}

#if defined(__SSE2__)
// Four entries sorted by index, each as a double: the index is its upper half, the value its lower.
//
// SSE2 has minimum and maximum of doubles, but not of 64-bit integers (only AVX-512 has). Positive
// doubles are ordered like their bits, except for NaN. None may be denormal either, as a thread may
// flush those to zero; hence the bias.
struct Four {
  __m128d low, high;

  static constexpr std::int32_t BIAS = 1 << 20;
  static constexpr std::int32_t NAN_FROM = 0x7ff00000 - BIAS;

  static Four load(const std::int32_t* indices, const float* values) {
    const __m128i upper = _mm_add_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(indices)),
                                        _mm_set1_epi32(BIAS));
    const __m128i lower = _mm_castps_si128(_mm_loadu_ps(values));
    return {_mm_castsi128_pd(_mm_unpacklo_epi32(lower, upper)),
            _mm_castsi128_pd(_mm_unpackhi_epi32(lower, upper))};
  }

  void store(std::int32_t* indices, float* values) const {
    const __m128 a = _mm_castpd_ps(low), b = _mm_castpd_ps(high);
    const __m128i upper = _mm_castps_si128(_mm_shuffle_ps(a, b, _MM_SHUFFLE(3, 1, 3, 1)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(indices),
                     _mm_sub_epi32(upper, _mm_set1_epi32(BIAS)));
    _mm_storeu_ps(values, _mm_shuffle_ps(a, b, _MM_SHUFFLE(2, 0, 2, 0)));
  }

  // Sort a bitonic sequence: compare entries at distance two, then neighbours.
  static Four sorted(__m128d a, __m128d b) {
    const __m128d lower = _mm_min_pd(a, b), upper = _mm_max_pd(a, b);
    const __m128d even = _mm_unpacklo_pd(lower, upper), odd = _mm_unpackhi_pd(lower, upper);
    const __m128d first = _mm_min_pd(even, odd), second = _mm_max_pd(even, odd);
    return {_mm_unpacklo_pd(first, second), _mm_unpackhi_pd(first, second)};
  }

  // Keep the four lowest of both here, and put the others into `other`.
  void sort_with(Four& other) {
    const __m128d falling_low = _mm_shuffle_pd(other.high, other.high, 1);
    const __m128d falling_high = _mm_shuffle_pd(other.low, other.low, 1);
    other = sorted(_mm_max_pd(low, falling_low), _mm_max_pd(high, falling_high));
    *this = sorted(_mm_min_pd(low, falling_low), _mm_min_pd(high, falling_high));
  }
};

//   a  [....|....|    ...     ]     The four highest so far stay in registers. Load four more from
//   b  [....|....|....| ...   ]     the list with the lower head; write the four lowest of eight.
template <>
void interleave(List<float, std::int32_t> a, List<float, std::int32_t> b,
                std::int32_t* indices, float* values) {
  if (std::min(a.count, b.count) < 4 ||
      std::max(a.indices[a.count - 1], b.indices[b.count - 1]) >= Four::NAN_FROM) {
    return interleave_in_order(a, b, indices, values);
  }
  Four held = Four::load(a.indices, a.values);
  std::int64_t i = 4, j = 0, out = 0;
  while (const std::int64_t steps = std::min(a.count - i, b.count - j) / 4) {
    for (std::int64_t step = 0; step < steps; step++, out += 4) {
      const bool take_b = b.indices[j] < a.indices[i];
      Four next = Four::load(either(a.indices + i, b.indices + j, take_b),
                             either(a.values + i, b.values + j, take_b));
      j += 4 * take_b;
      i += 4 * !take_b;
      held.sort_with(next);
      held.store(indices + out, values + out);
      held = next;
    }
  }
  std::int32_t last_indices[4], few_indices[8];
  float last_values[4], few_values[8];
  held.store(last_indices, last_values);
  List<float, std::int32_t> less = a.from(i), more = b.from(j);
  if (less.count > more.count) std::swap(less, more);
  interleave_in_order({last_indices, last_values, 4}, less, few_indices, few_values);
  interleave_in_order({few_indices, few_values, 4 + less.count}, more, indices + out, values + out);
}
#endif

// taken ? value : 0, without a branch.
template <class T>
T masked(T value, bool taken) {
  Key<T> bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= -static_cast<Key<T>>(taken);
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// If two neighbours have the same index, set the first value to their sum and the second to zero;
// return how many are not zero. indices[-1] and indices[count] must exist and differ from the rest.
template <class T, class I>
std::int64_t add_neighbours(const I* indices, T* values, std::int64_t count) {
  std::int64_t found = 0;
  for (std::int64_t begin = 0; begin < count; begin += 4096) {
    const std::int64_t end = std::min(begin + 4096, count);
    Key<T> nonzeros = 0;  // as wide as the values, so that compilers vectorize the loop
    for (std::int64_t i = begin; i < end; i++) {
      const T sum = values[i] + masked(values[i + 1], indices[i] == indices[i + 1]);
      values[i] = masked(sum, indices[i] != indices[i - 1]);
      nonzeros += key(values[i]) != 0;
    }
    found += nonzeros;
  }
  return found;
}

// Return the sums of two lists, zeros included, in memory that the next call reuses.
template <class T, class I>
List<T, I> add(const List<T, I>& a, const List<T, I>& b, std::int64_t* nonzeros) {
  static thread_local Scratch<I> index_memory;
  static thread_local Scratch<T> value_memory;
  const std::int64_t count = a.count + b.count;
  I* const indices = index_memory.reserve(count + 2) + 1;
  T* const values = value_memory.reserve(count + 1);
  interleave(a, b, indices, values);
  indices[-1] = indices[count] = -1;
  values[count] = 0;
  *nonzeros = add_neighbours(indices, values, count);
  return {indices, values, count};
}

template <class T, class I>
void filter(const List<T, I>& all, Key<T> floor, Output<T, I>& output) {
  filter_one_by_one(all.indices, all.values, all.count, floor, output);
}

template <>
void filter(const List<float, std::int32_t>& all, std::int32_t floor,
            Output<float, std::int32_t>& output) {
  instructions().filter(all.indices, all.values, all.count, floor, output);
}

// Write the k largest entries, and return how many there are. The output has room for SLACK more.
template <class T, class I>
std::int64_t merge(const List<T, I>& a, const List<T, I>& b, std::int64_t k, I* indices,
                   T* values) {
  return guarded([&]() -> std::int64_t {
    std::int64_t nonzeros;
    const List<T, I> all = add(a, b, &nonzeros);
    Output<T, I> output{indices, values, 0};
    if (nonzeros <= k) {
      filter(all, 0, output);
      return output.count;
    }
    const auto at_k = place_among(all.values, all.count, k, values);
    // Of the entries equal to the k-th only the first few are kept: those before `cut`.
    std::int64_t cut = all.count, ties = k - at_k.larger;
    if (ties < static_cast<std::int64_t>(at_k.equal)) {
      for (cut = 0; ties > 0; cut++) ties -= key(all.values[cut]) == at_k.key;
    }
    filter({all.indices, all.values, cut}, at_k.key - 1, output);
    filter(all.from(cut), at_k.key, output);
    return output.count;
  });
}

// Write the sum of all lists, each index summed in the order of the lists; return how many entries
// are not zero. Lists are interleaved pairwise, and equal indices summed at the end. The output has
// room for the entries of all lists and SLACK more.
template <class T, class I>
std::int64_t sum(const I* const* indices, const T* const* values, const std::int64_t* counts,
                 std::int64_t lists, I* out_indices, T* out_values) {
  return guarded([&]() -> std::int64_t {
    std::vector<List<T, I>> runs, fewer;
    for (std::int64_t i = 0; i < lists; i++) runs.push_back({indices[i], values[i], counts[i]});
    if (lists == 2) {
      Output<T, I> output{out_indices, out_values, 0};
      std::int64_t nonzeros;
      filter(add(runs[0], runs[1], &nonzeros), 0, output);
      return output.count;
    }
    static thread_local Scratch<I> index_memory[2];
    static thread_local Scratch<T> value_memory[2];
    const std::int64_t total = std::accumulate(counts, counts + lists, std::int64_t{0});
    for (int which = 0; runs.size() > 1; which = 1 - which) {
      I* to_indices = index_memory[which].reserve(total);
      T* to_values = value_memory[which].reserve(total);
      fewer.clear();
      for (std::size_t pair = 0; pair < runs.size(); pair += 2) {
        const List<T, I> a = runs[pair], b = pair + 1 < runs.size() ? runs[pair + 1] : a.from(a.count);
        interleave_in_order(a, b, to_indices, to_values);
        fewer.push_back({to_indices, to_values, a.count + b.count});
        to_indices += a.count + b.count;
        to_values += a.count + b.count;
      }
      runs.swap(fewer);
    }
    const List<T, I> all = runs[0];
    std::int64_t count = 0;
    T sum = 0;
    for (std::int64_t i = 0; i < total; i++) {
      const bool goes_on = i > 0 && all.indices[i] == all.indices[i - 1];
      count += !goes_on && sum != T(0);
      sum = masked(sum, goes_on) + all.values[i];
      out_indices[count] = all.indices[i];
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
                                        I* indices, T* values) {                                  \
    return gtopk::merge<T, I>({a_indices, a_values, a_count}, {b_indices, b_values, b_count}, k,  \
                              indices, values);                                                   \
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
