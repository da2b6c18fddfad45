// The process's operator new, whose next call but so many fails when asked to. To be preloaded.
#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> calls_left{-1};  // before the one that fails; none fails from -1 on
}

// Return how many calls were left; -1 when one has failed since, or none was to.
extern "C" long fail_after(long calls) { return calls_left.exchange(calls); }

void* operator new(std::size_t size) {
  if (calls_left >= 0 && calls_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
