// Select: accumulate and collect candidates in one pass over memory, then rank the few candidates.
//
//   first scan    adds the gradient; threshold: the caller's guess, from the step before
//   second scan   if fewer than k were found; threshold: estimated from a sample
//   third scan    if the sample misled; without a threshold, pruned on the way
//
// If larger and larger entries keep coming, a scan stops collecting, and keeps the k largest so far.
// The next scan continues from there, with a sampled threshold.
#include <algorithm>
#include <climits>
#include <cmath>
#include <new>
#include <vector>

#include "abi.hpp"
#include "candidates.hpp"
#include "gradient.hpp"
#include "pool.hpp"
#include "scan.hpp"
#include "stream.hpp"

namespace gtopk {
namespace {

// The next threshold is the |value| at rank AIM * k + AIM_AT_LEAST: the k selected entries are
// cleared, so today's ranks from k+1 on are the next step's candidates (see reference.py).
constexpr double AIM = 2.2;
constexpr std::size_t AIM_AT_LEAST = 256;

// For values in random order the threshold rises 20-fold in rank with each prune, so four suffice
// for 6e5 k values.
constexpr int PRUNES = 4;

constexpr std::int64_t THREAD_BLOCKS = 128;  // the least work that is worth waking a thread

std::size_t aim(std::size_t k) { return static_cast<std::size_t>(AIM * k) + AIM_AT_LEAST; }

template <class T, class I>
class Search {
 public:
  // dense = before + gradient; they may be the same array.
  Search(const T* before, T* dense, std::int64_t length, std::size_t k, int threads)
      : before_(before), dense_(dense), length_(length), k_(k), blocks_((length + BLOCK - 1) / BLOCK) {
    threads_ = static_cast<int>(std::clamp<std::int64_t>(blocks_ / THREAD_BLOCKS, 1, threads));
    if (parts().size() < static_cast<std::size_t>(threads_)) parts().resize(threads_);
  }

  // After std::bad_alloc the gradient was added as a whole, or not at all.
  void run(const Gradient<T>* gradient, double threshold) {
    scan(gradient, threshold > 0 ? key(static_cast<T>(threshold)) : 1, PRUNES);
    if (misled()) scan(nullptr, sampled_threshold(), PRUNES);
    if (misled()) scan(nullptr, 1, INT_MAX);
    if (any(&Candidates<T, I>::stopped)) go_on(sampled_threshold());
    if (any(&Candidates<T, I>::failed)) throw std::bad_alloc();
    for (int part = 1; part < threads_; part++) found().append(parts()[part]);
  }

  // Write the k largest, and return how many there are.
  std::int64_t finish(I* indices, T* values, double* next_threshold) const {
    const std::size_t count = found().count();
    const I* from_indices = found().indices();
    const T* from_values = found().values();
    *next_threshold = 0;
    if (count < k_) {
      std::copy_n(from_indices, count, indices);
      std::copy_n(from_values, count, values);
      return count;
    }
    const Ranking<T> ranking(from_values, count);
    const auto at_k = ranking.at(k_);
    Cut<T> cut(k_, at_k);
    std::size_t kept = 0;
    for (std::size_t i = 0; kept < k_; i++) {
      indices[kept] = from_indices[i];
      values[kept] = from_values[i];
      kept += cut.keeps(from_values[i]);
    }
    const double next = next_guess(ranking, magnitude<T>(at_k.key));
    if (std::isfinite(next)) *next_threshold = next;
    return kept;
  }

  int scans() const { return scans_; }

 private:
  // The calling thread's, whose memory is reused from call to call.
  static std::vector<Candidates<T, I>>& parts() {
    static thread_local std::vector<Candidates<T, I>> parts;
    return parts;
  }
  Candidates<T, I>& found() const { return parts()[0]; }

  bool any(bool Candidates<T, I>::* fact) const {
    return std::any_of(parts().begin(), parts().begin() + threads_,
                       [=](const auto& part) { return part.*fact; });
  }

  // Whether the threshold hid some of the k largest. (A part that stopped has k candidates.)
  bool misled() const {
    std::size_t count = 0;
    for (int part = 0; part < threads_; part++) count += parts()[part].count();
    return count < k_ && threshold_ > 1 && !any(&Candidates<T, I>::failed);
  }

  void scan(const Gradient<T>* gradient, Key<T> threshold, int prunes) {
    threshold_ = std::max<Key<T>>(threshold, 1);
    const std::int64_t longest = (blocks_ + threads_ - 1) / threads_ * BLOCK;
    for (int part = 0; part < threads_; part++) {
      parts()[part].begin(k_, longest, BLOCK, threshold_, prunes);
    }
    walk(gradient);
  }

  void go_on(Key<T> threshold) {
    for (int part = 0; part < threads_; part++) parts()[part].go_on(threshold);
    walk(nullptr);
  }

  void walk(const Gradient<T>* gradient) {
    scans_++;
    auto& all = parts();
    // Memory was reserved before, so that no part fails before its share of the gradient is added.
    in_parallel(threads_, blocks_, [&](int part, std::int64_t begin, std::int64_t end) {
      const std::int64_t from = std::max(begin * BLOCK, all[part].from);
      collect(gradient, from, std::min(end * BLOCK, length_), all[part]);
    });
  }

  void collect(const Gradient<T>* gradient, std::int64_t begin, std::int64_t end,
               Candidates<T, I>& candidates) const {
    const Scan<T> scan_block = gtopk::scan<T>();
    std::uint32_t offsets[BLOCK + SLACK];
    std::size_t hits = 0;
    const T* const before = gradient == nullptr ? dense_ : before_;
    // Into memory of its own a large sum goes past the caches: from a block that is in one.
    const bool streams =
        before != dense_ && length_ * static_cast<std::int64_t>(sizeof(T)) >= STREAMED_BYTES;
    alignas(64) T sums[BLOCK];
    const auto walk = [&](auto&& addend) {
      for (std::int64_t start = begin; start < end; start += BLOCK) {
        const std::int64_t count = std::min(BLOCK, end - start);
        const bool many = hits > BLOCK / MANY;
        T* const dense = streams ? sums : dense_ + start;
        hits = scan_block(dense, before + start, addend(start, count), count, candidates.floor,
                          many, offsets);
        if (hits) candidates.append(dense, start, offsets, hits);
        if (streams) {
          stream(reinterpret_cast<char*>(dense_ + start), reinterpret_cast<const char*>(sums),
                 count * sizeof(T));
        }
      }
      if (streams) end_stream();
    };
    if (gradient == nullptr) {
      walk([](std::int64_t, std::int64_t) -> const T* { return nullptr; });
    } else {
      GradientBlocks<T> blocks(*gradient);
      walk([&](std::int64_t start, std::int64_t count) { return blocks.next(start, count); });
    }
  }

  // Estimate the key at the target rank; 1 if a sample would be too small.
  //
  // It samples cache lines, one at random in each of equally long stretches, so that it works for
  // periodic data, too. The generator's seed is fixed, so results are reproducible.
  Key<T> sampled_threshold() const {
    constexpr std::int64_t LINE = 16, RANK = 256;
    const double share = std::min(0.5, double(RANK) / aim(k_));
    const auto lines = static_cast<std::int64_t>(share * length_ / LINE);
    if (lines < 64) return 1;
    std::vector<T> sample(lines * LINE);
    const std::int64_t stretch = length_ / lines;
    std::uint64_t random = 0x9e3779b97f4a7c15;
    for (std::int64_t line = 0; line < lines; line++) {
      random = random * 6364136223846793005 + 1442695040888963407;
      const std::int64_t start = line * stretch + (random >> 33) % (stretch - LINE + 1);
      std::copy_n(dense_ + start, LINE, sample.begin() + line * LINE);
    }
    const auto rank = static_cast<std::size_t>(double(aim(k_)) * sample.size() / length_) + 1;
    if (rank > sample.size()) return 1;
    return Ranking<T>(sample.data(), sample.size()).at(rank).key;
  }

  // Return the |value| at the target rank, extrapolated if there are fewer candidates.
  double next_guess(const Ranking<T>& ranking, double at_k) const {
    const std::size_t count = found().count(), rank = aim(k_);
    if (rank <= count) return magnitude<T>(ranking.at(rank).key);
    const double lowest = magnitude<T>(ranking.lowest());
    if (count == k_) return lowest / 2;
    const double slope = (at_k - lowest) / (count - k_);
    return std::max(lowest - slope * (rank - count), lowest / 2);
  }

  const T* before_;
  T* dense_;
  std::int64_t length_;
  std::size_t k_;
  std::int64_t blocks_;
  int threads_ = 1, scans_ = 0;
  Key<T> threshold_ = 1;
};

// Statistics of a search; the same struct is in __init__.py.
struct Report {
  double next_threshold;
  std::int64_t scans;
};

template <class T, class I>
std::int64_t select(const T* before, T* dense, std::int64_t length, const Gradient<T>& gradient,
                    std::int64_t k, double threshold, int threads, I* indices, T* values,
                    Report* report) {
  return guarded([&] {
    Search<T, I> search(before, dense, length, k, threads);
    search.run(gradient.arrays ? &gradient : nullptr, threshold);
    report->scans = search.scans();
    return search.finish(indices, values, &report->next_threshold);
  });
}

}  // namespace
}  // namespace gtopk

// If `arrays` is null nothing is added, and `dense` is not written.
#define DEFINE(T, I, SUFFIX)                                                                     \
  GTOPK_API std::int64_t select_##SUFFIX(                                                        \
      const T* before, T* dense, std::int64_t length, const void* const* arrays,                 \
      const std::int64_t* lengths, std::int32_t format, double weight, const T* velocity,        \
      T* moved, double momentum, std::int64_t k, double threshold, int threads, I* indices,      \
      T* values, gtopk::Report* report) {                                                        \
    return gtopk::select<T, I>(                                                                  \
        before, dense, length,                                                                   \
        {arrays, lengths, gtopk::Format{format}, static_cast<T>(weight), velocity, moved,        \
         static_cast<T>(momentum)},                                                              \
        k, threshold, threads, indices, values, report);                                         \
  }
DEFINE(float, std::int32_t, f32_i32)
DEFINE(float, std::int64_t, f32_i64)
DEFINE(double, std::int32_t, f64_i32)
DEFINE(double, std::int64_t, f64_i64)
