#include "pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>

namespace gtopk {
namespace {

class Pool {
 public:
  const pid_t process = getpid();

  // Run task(1..parts-1) on workers and task(0) here; return false if the pool is busy.
  bool run(int parts, const std::function<void(int)>& task) {
    const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
    if (!alone.owns_lock()) return false;
    while (workers_ < parts - 1) {
      try {
        std::thread(&Pool::work, this, workers_ + 1).detach();
      } catch (const std::exception&) {  // no more threads, or no memory for one
        return false;
      }
      ++workers_;
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      task_ = &task;
      parts_ = parts;
      unfinished_ = parts - 1;
      error_ = nullptr;
      ++round_;
    }
    begin_.notify_all();
    attempt(task, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    end_.wait(lock, [&] { return unfinished_ == 0; });
    if (error_) std::rethrow_exception(error_);
    return true;
  }

 private:
  void work(int part) {
    std::uint64_t seen = 0;
    for (;;) {
      const std::function<void(int)>* task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        begin_.wait(lock, [&] { return round_ != seen; });
        seen = round_;
        if (part >= parts_) continue;
        task = task_;
      }
      attempt(*task, part);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--unfinished_ == 0) end_.notify_one();
    }
  }

  void attempt(const std::function<void(int)>& task, int part) {
    try {
      task(part);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::current_exception();
    }
  }

  std::mutex running_;  // held by the caller that uses the pool
  std::mutex mutex_;    // guards all that follow
  std::condition_variable begin_, end_;
  const std::function<void(int)>* task_ = nullptr;
  int parts_ = 0, unfinished_ = 0, workers_ = 0;
  std::uint64_t round_ = 0;
  std::exception_ptr error_;
};

// A forked child has none of the threads, and perhaps a locked mutex, so it makes a new pool. Pools
// are never freed, as their threads use them until the process ends.
Pool& pool() {
  static std::atomic<Pool*> current{nullptr};
  Pool* found = current.load();
  while (found == nullptr || found->process != getpid()) {
    auto fresh = std::make_unique<Pool>();
    if (current.compare_exchange_strong(found, fresh.get())) return *fresh.release();
  }
  return *found;
}

}  // namespace

int in_parallel(int threads, std::int64_t length,
                const std::function<void(int, std::int64_t, std::int64_t)>& body) {
  const int parts = std::max<std::int64_t>(1, std::min<std::int64_t>(threads, length));
  const auto task = [&](int part) {
    body(part, length * part / parts, length * (part + 1) / parts);
  };
  if (parts == 1 || !pool().run(parts, task)) {
    for (int part = 0; part < parts; part++) task(part);
  }
  return parts;
}

}  // namespace gtopk
