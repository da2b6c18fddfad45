// An operator new to preload into a process: on request, one of its next calls fails.
#include <atomic>
#include <cstdlib>
#include <new>

namespace {
std::atomic<long> calls_left{-1};  // calls before the one that fails; -1: none fails
}

// Let a call fail after `calls` others; return how many were left, or -1 if none was to fail.
extern "C" long fail_after(long calls) { return calls_left.exchange(calls); }

void* operator new(std::size_t size) {
  if (calls_left >= 0 && calls_left-- == 0) throw std::bad_alloc();
  if (void* const memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
