// Ranking: find the key at a rank among many values, by a histogram and a small partial sort.
//
//   keys      lowest |....:...::.:::|:|.|.| highest       2^11 bins over the range of the keys
//   rank r                       ^ r is in this bin: only its keys are looked at again
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <vector>

#include "keys.hpp"

namespace gtopk {

template <class T>
class Ranking {
 public:
  Ranking(const T* values, std::size_t count) : values_(values), count_(count) {
    Key<T> highest = 0;
    for (std::size_t i = 0; i < count; i++) {
      lowest_ = std::min(lowest_, key(values[i]));
      highest = std::max(highest, key(values[i]));
    }
    if (count <= FEW) return;
    while (((highest - lowest_) >> shift_) >= BINS) shift_++;
    // Two histograms, alternating: neighbours often are in one bin, and increments of one counter
    // would have to wait for each other.
    std::array<std::array<std::uint32_t, BINS>, 2> counts{};
    std::size_t i = 0;
    for (; i + 2 <= count; i += 2) {
      counts[0][bin(key(values[i]))]++;
      counts[1][bin(key(values[i + 1]))]++;
    }
    if (i < count) counts[0][bin(key(values[i]))]++;
    for (int b = 0; b < BINS; b++) counts_[b] = std::size_t{counts[0][b]} + counts[1][b];
  }

  // The key at a rank, and how many keys are larger than it, and equal to it.
  struct Place {
    Key<T> key;
    std::size_t larger, equal;
  };

  // Rank 1 is the largest.
  Place at(std::size_t rank) const {
    static thread_local std::vector<Key<T>> inside;
    if (count_ <= FEW) {
      inside.resize(count_);
      std::transform(values_, values_ + count_, inside.begin(), key<T>);
      return nth_largest(inside, count_, rank, 0);
    }
    int wanted = BINS - 1;
    std::size_t above = 0;
    while (rank > above + counts_[wanted]) above += counts_[wanted--];
    const Key<T> first = lowest_ + (static_cast<Key<T>>(wanted) << shift_);
    if (shift_ == 0) return {first, above, counts_[wanted]};
    inside.resize(counts_[wanted] + 1);
    std::size_t found = 0;
    for (std::size_t i = 0; i < count_; i++) {
      const Key<T> candidate = key(values_[i]);
      inside[found] = candidate;  // overwritten by the next one if it is of another bin
      found += bin(candidate) == wanted;
    }
    return nth_largest(inside, found, rank - above, above);
  }

  Key<T> lowest() const { return lowest_; }

 private:
  static constexpr int BINS = 1 << 11;
  static constexpr std::size_t FEW = 1024;  // sorting these is faster than clearing the bins

  static Place nth_largest(std::vector<Key<T>>& keys, std::size_t count, std::size_t rank,
                           std::size_t above) {
    const auto place = keys.begin() + (rank - 1);
    std::nth_element(keys.begin(), place, keys.begin() + count, std::greater<Key<T>>());
    const auto larger = std::count_if(keys.begin(), place, [&](Key<T> k) { return k > *place; });
    const auto equal = std::count(keys.begin(), keys.begin() + count, *place);
    return {*place, above + static_cast<std::size_t>(larger), static_cast<std::size_t>(equal)};
  }

  int bin(Key<T> candidate) const { return static_cast<int>((candidate - lowest_) >> shift_); }

  const T* values_;
  std::size_t count_;
  Key<T> lowest_ = LARGEST<T>;
  int shift_ = 0;
  std::array<std::size_t, BINS> counts_{};
};

// Ranking(...).at(rank) in about half the time; memory: room for count + 1.
//
//   keys      lowest |....:...[:::|:]|.|.| highest       A sample gives a band that most likely
//   rank r                       ^                       contains the rank; only that is ranked.
template <class T>
typename Ranking<T>::Place place_among(const T* values, std::size_t count, std::size_t rank,
                                       T* memory) {
  constexpr std::size_t SAMPLE = 512;
  // Three standard deviations of the number of samples above the median.
  constexpr std::size_t MARGIN = 34;
  if (count >= 8 * SAMPLE) {
    std::array<Key<T>, SAMPLE> sample;
    const std::size_t stride = (count / SAMPLE - 1) | 1;  // odd: not always the same columns
    for (std::size_t i = 0; i < SAMPLE; i++) sample[i] = key(values[i * stride]);
    const std::size_t below = (count - rank) * SAMPLE / count;
    const auto at_low = sample.begin() + (below < MARGIN ? 0 : below - MARGIN);
    const auto at_high = sample.begin() + std::min(below + MARGIN, SAMPLE - 1);
    std::nth_element(sample.begin(), at_low, sample.end());
    std::nth_element(at_low + 1, at_high, sample.end());
    const Key<T> low = below < MARGIN ? 0 : *at_low;
    const Key<T> high = below + MARGIN < SAMPLE ? *at_high : LARGEST<T>;
    std::size_t above = 0, inside = 0;
    for (std::size_t i = 0; i < count; i++) {
      const Key<T> candidate = key(values[i]);
      memory[inside] = values[i];  // overwritten by the next one if it is not in the band
      inside += static_cast<std::size_t>(candidate >= low) - (candidate > high);
      above += candidate > high;
    }
    if (rank > above && rank <= above + inside) {
      typename Ranking<T>::Place place = Ranking<T>(memory, inside).at(rank - above);
      place.larger += above;
      return place;
    }
  }
  return Ranking<T>(values, count).at(rank);
}

}  // namespace gtopk
