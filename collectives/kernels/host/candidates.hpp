// Candidates: entries found so far; they always include the k largest of all scanned.
#pragma once

#include <memory>
#include <new>

#include "ranking.hpp"

namespace gtopk {

// Uninitialized memory that grows as needed, and is freed if much more than needed.
template <class Element>
class Scratch {
 public:
  Element* reserve(std::size_t count) {
    if (count > room_ || (room_ > MOST && count < room_ / 2)) {
      memory_.reset();
      room_ = 0;  // in case the next line throws
      memory_.reset(new Element[count]);
      room_ = count;
    }
    return memory_.get();
  }
  Element* get() const { return memory_.get(); }

 private:
  static constexpr std::size_t MOST = (std::size_t{64} << 20) / sizeof(Element);
  std::unique_ptr<Element[]> memory_;
  std::size_t room_ = 0;
};

// Tells whether an entry is among the k largest. Must be called in the order of indices, as of the
// entries equal to the k-th only the first few are.
template <class T>
class Cut {
 public:
  Cut(std::size_t k, typename Ranking<T>::Place at_k) : at_k_(at_k.key), ties_(k - at_k.larger) {}

  bool keeps(T value) {
    const bool tie = key(value) == at_k_ && ties_ > 0;
    ties_ -= tie;
    return tie || key(value) > at_k_;
  }

 private:
  Key<T> at_k_;
  std::size_t ties_;
};

template <class T, class I>
class Candidates {
 public:
  // block: the most hits of one `append`.
  // threshold: the smallest key to collect, at least 1.
  // prunes: after so many prunes the threshold is considered hopeless: `stopped` becomes true, and
  //         no more is collected than the k largest so far. If there is no memory to prune,
  //         `failed` becomes true, and all candidates are dropped.
  void begin(std::size_t k, std::size_t length, std::size_t block, Key<T> threshold, int prunes) {
    k_ = k;
    block_ = block;
    limit_ = std::min(4 * k + block, length) + block;
    indices_ = index_memory_.reserve(limit_);
    values_ = value_memory_.reserve(limit_);
    count_ = 0;
    prunes_left_ = prunes;
    stopped = failed = false;
    from = 0;
    floor = threshold - 1;
  }

  // Continue from where this stopped. (A part that did not stop has nothing left to scan.)
  void go_on(Key<T> threshold) {
    if (!stopped) from = std::numeric_limits<std::int64_t>::max();
    floor = std::max(stopped ? floor_of_kept_ : floor, threshold - 1);
    stopped = false;
    prunes_left_ = std::numeric_limits<int>::max();
  }

  // Append the hits of a block; dense: the block's elements, from index `start` on.
  void append(const T* dense, std::int64_t start, const std::uint32_t* offsets,
              std::size_t hits) noexcept {
    for (std::size_t j = 0; j < hits; j++) {
      indices_[count_ + j] = static_cast<I>(start + offsets[j]);
      values_[count_ + j] = dense[offsets[j]];
    }
    count_ += hits;
    if (count_ + block_ <= limit_) return;
    prune();
    if (--prunes_left_ > 0 || failed) return;
    stopped = true;
    from = start + static_cast<std::int64_t>(block_);
    floor_of_kept_ = floor;
    floor = LARGEST<T>;
  }

  // Append the candidates of a later part.
  void append(const Candidates& later) {
    if (count_ + later.count_ > limit_) grow(count_ + later.count_);
    std::copy_n(later.indices_, later.count_, indices_ + count_);
    std::copy_n(later.values_, later.count_, values_ + count_);
    count_ += later.count_;
  }

  std::size_t count() const { return count_; }
  const I* indices() const { return indices_; }
  const T* values() const { return values_; }

  Key<T> floor = 0;  // only larger keys are candidates
  bool stopped = false, failed = false;
  std::int64_t from = 0;  // where to continue; 0: at the beginning of the part

 private:
  // Keep the k largest so far, and raise the floor: from now on only larger ones matter.
  void prune() {
    typename Ranking<T>::Place at_k;
    try {
      at_k = Ranking<T>(values_, count_).at(k_);
    } catch (const std::bad_alloc&) {  // the scan must continue, to add the whole gradient
      failed = true;
      floor = LARGEST<T>;
      count_ = 0;
      return;
    }
    Cut<T> cut(k_, at_k);
    std::size_t kept = 0;
    for (std::size_t i = 0; i < count_; i++) {
      indices_[kept] = indices_[i];
      values_[kept] = values_[i];
      kept += cut.keeps(values_[i]);
    }
    count_ = k_;
    floor = at_k.key;
  }

  void grow(std::size_t room) {
    Scratch<I> indices;
    Scratch<T> values;
    std::copy_n(indices_, count_, indices.reserve(room));
    std::copy_n(values_, count_, values.reserve(room));
    index_memory_ = std::move(indices);
    value_memory_ = std::move(values);
    indices_ = index_memory_.get();
    values_ = value_memory_.get();
    limit_ = room;
  }

  Scratch<I> index_memory_;
  Scratch<T> value_memory_;
  I* indices_ = nullptr;
  T* values_ = nullptr;
  std::size_t k_ = 0, block_ = 0, limit_ = 0, count_ = 0;
  Key<T> floor_of_kept_ = 0;
  int prunes_left_ = 0;
};

}  // namespace gtopk
