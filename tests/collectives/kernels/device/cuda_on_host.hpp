// CUDA C++ on the host: a block's threads are fibres, blocks run one after the other.
//
//   launch ---> block 7 ---> fibre 0 .. fibre THREADS-1 ---> block 2 ---> ...
//                            each runs until it meets a barrier, a vote or a shuffle (or, when
//                            shuffled, an atomic); the rest get their turn; all there: go on
//
// With a seed, the order of the fibres, of the blocks, and the turns at atomics are shuffled, and
// warps run ahead of others, so that a missing barrier gives another result. Errors end a launch with a sentence: a barrier that
// some threads miss, a vote that not all lanes take part in, a deadlock, arguments of other sizes.
// Votes and shuffles of whole warps only. Included before the kernels; see kernels_on_host.cpp.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time, so a function's static is its block's

struct Place {
  unsigned x;
};
inline Place threadIdx, blockIdx, gridDim;

namespace host {

// ---- fibres

#if defined(__x86_64__)
typedef void* Context;
// Save what a call must keep, swap the stacks, restore.
extern "C" void host_switch(void** from, void* to);
asm(R"(
.text
.globl host_switch
.hidden host_switch
.type host_switch, @function
host_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size host_switch, . - host_switch
)");
inline void swap(Context& from, Context& to) { host_switch(&from, to); }
inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  void** top = (void**)((uintptr_t)(stack + bytes) & ~(uintptr_t)15);
  *--top = nullptr;  // keeps the alignment a call leaves
  *--top = (void*)entry;
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  context = top;
}
#else
typedef ucontext_t Context;
inline void swap(Context& from, Context& to) { swapcontext(&from, &to); }
inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
#endif

constexpr size_t STACK_BYTES = 64 << 10;

struct Fibre {
  Context context;
  std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
  enum State { READY, AT_BARRIER, AT_VOTE, DONE } state;
  int line;  // where it waits
};

struct Warp {
  uint64_t posted[32], seen[32];
  unsigned count;
};

inline std::vector<Fibre> fibres;
inline std::vector<Warp> warps;
inline Context scheduler;
inline std::function<void()> body;
inline std::string error;
inline std::mt19937_64 chance;
inline bool shuffled;
inline unsigned alive, arrived, tally, result;

inline Fibre& current() { return fibres[threadIdx.x]; }

// Give the turn back; `threadIdx` is right again when it returns.
inline void pause() {
  const Place self = threadIdx;
  swap(fibres[self.x].context, scheduler);
  threadIdx = self;
}

inline void fail(const std::string& what) {
  if (error.empty())
    error = what + " (thread " + std::to_string(threadIdx.x) + " of block " +
            std::to_string(blockIdx.x) + ")";
  pause();  // for good: the launch ends
}

// Release the barrier when every thread that has not ended is there.
inline void release() {
  if (!alive || arrived < alive) return;
  int line = 0;
  for (Fibre& fibre : fibres) {
    if (fibre.state != Fibre::AT_BARRIER) continue;
    if (line && fibre.line != line)
      error = "threads of a block wait at two barriers, in lines " + std::to_string(line) +
              " and " + std::to_string(fibre.line);
    line = fibre.line;
    fibre.state = Fibre::READY;
  }
  arrived = 0;
  result = tally;
  tally = 0;
}

// Wait for the block; return how many threads came with a true predicate.
inline unsigned barrier(bool predicate, int line) {
  tally += predicate;
  ++arrived;
  current().state = Fibre::AT_BARRIER;
  current().line = line;
  release();
  // Even the last one gives its turn away: who goes on first is not its own choice.
  pause();
  return result;
}

// Wait for the warp; return what each of its lanes came with.
inline const uint64_t* vote(unsigned mask, uint64_t value, int line) {
  Warp& warp = warps[threadIdx.x / 32];
  if (mask != 0xffffffffu) fail("a vote or shuffle is not of the whole warp");
  warp.posted[threadIdx.x % 32] = value;
  current().state = Fibre::AT_VOTE;
  current().line = line;
  if (++warp.count == 32) {
    const unsigned first = threadIdx.x / 32 * 32;
    for (unsigned lane = 0; lane < 32; ++lane) {
      Fibre& fibre = fibres[first + lane];
      if (fibre.line != line)
        fail("lanes of a warp vote in lines " + std::to_string(line) + " and " +
             std::to_string(fibre.line));
      fibre.state = Fibre::READY;
    }
    std::memcpy(warp.seen, warp.posted, sizeof warp.seen);
    warp.count = 0;
  }
  pause();
  return warp.seen;
}

inline void entry() {
  body();
  current().state = Fibre::DONE;
  --alive;
  release();
  pause();
}

inline void run_block(unsigned threads) {
  fibres.resize(threads);
  warps.assign((threads + 31) / 32, Warp{});
  alive = threads;
  arrived = tally = 0;
  std::vector<unsigned> order(threads);
  for (unsigned thread = 0; thread < threads; ++thread) {
    order[thread] = thread;
    fibres[thread].state = Fibre::READY;
    prepare(fibres[thread].context, fibres[thread].stack.get(), STACK_BYTES, entry);
  }
  uint64_t asleep = 0;  // fair turns would hide most races: some warps run far ahead of others
  while (alive && error.empty()) {
    bool ready = false, moved = false;
    if (shuffled) {
      std::shuffle(order.begin(), order.end(), chance);
      if (chance() % 8 == 0) asleep = chance() & chance();
    }
    for (unsigned thread : order) {
      if (fibres[thread].state != Fibre::READY) continue;
      ready = true;
      if (asleep >> thread / 32 & 1) continue;
      moved = true;
      threadIdx.x = thread;
      swap(scheduler, fibres[thread].context);
      if (!error.empty()) return;
    }
    if (!moved) asleep = 0;
    if (!ready) error = "deadlock: every thread of a block waits, or has ended";
  }
}

// ---- launches

typedef std::function<void(void**)> Kernel;
typedef std::pair<std::vector<size_t>, Kernel> Entry;  // the arguments' sizes, and the call

template <class... A, size_t... I>
void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
  kernel(*(std::remove_cv_t<A>*)arguments[I]...);
}

template <class... A> Entry kernel_of(void (*kernel)(A...)) {
  return {{sizeof(A)...}, [kernel](void** arguments) {
            call(kernel, arguments, std::index_sequence_for<A...>{});
          }};
}

extern std::map<std::string, Entry> kernels;

inline const char* launch(
    const char* name, unsigned blocks, unsigned threads, void** arguments, const size_t* sizes,
    unsigned count, uint64_t seed) {
  error.clear();
  const auto found = kernels.find(name);
  if (found == kernels.end()) return "there is no such kernel";
  if (found->second.first != std::vector<size_t>(sizes, sizes + count))
    return "the arguments' number or sizes are not the kernel's";
  shuffled = seed != 0;
  chance.seed(seed);
  gridDim.x = blocks;
  body = [&] { found->second.second(arguments); };
  std::vector<unsigned> order(blocks);
  for (unsigned block = 0; block < blocks; ++block) order[block] = block;
  if (shuffled) std::shuffle(order.begin(), order.end(), chance);
  for (unsigned block : order) {
    blockIdx.x = block;
    run_block(threads);
    if (!error.empty()) break;
  }
  return error.empty() ? nullptr : error.c_str();
}

template <class To, class From> To bits(From from) {
  static_assert(sizeof(To) >= sizeof(From), "no bit is lost");
  To to{};
  std::memcpy(&to, &from, sizeof from);
  return to;
}

template <class T> T value_of(uint64_t posted) {
  T value;
  std::memcpy(&value, &posted, sizeof value);
  return value;
}

}  // namespace host

// ---- what the kernels call

inline void __syncthreads(int line = __builtin_LINE()) { host::barrier(false, line); }
inline int __syncthreads_count(int predicate, int line = __builtin_LINE()) {
  return (int)host::barrier(predicate != 0, line);
}
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
  return host::barrier(predicate != 0, line) != 0;
}
inline void __threadfence() {}

inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  const uint64_t* seen = host::vote(mask, predicate != 0, line);
  unsigned votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= (unsigned)seen[lane] << lane;
  return votes;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return __ballot_sync(mask, predicate, line) != 0;
}
inline void __syncwarp(int line = __builtin_LINE()) { host::vote(0xffffffffu, 0, line); }
template <class T> T __shfl_sync(unsigned mask, T value, int from, int line = __builtin_LINE()) {
  return host::value_of<T>(host::vote(mask, host::bits<uint64_t>(value), line)[from]);
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int distance, int line = __builtin_LINE()) {
  const unsigned lane = threadIdx.x % 32;
  return host::value_of<T>(host::vote(mask, host::bits<uint64_t>(value), line)[lane ^ distance]);
}
template <class T> T __shfl_up_sync(unsigned mask, T value, int distance, int line = __builtin_LINE()) {
  const unsigned lane = threadIdx.x % 32;
  const uint64_t* seen = host::vote(mask, host::bits<uint64_t>(value), line);
  return host::value_of<T>(seen[lane >= (unsigned)distance ? lane - distance : lane]);
}

template <class T> T atomicAdd(T* at, T addend) {
  if (host::shuffled && host::chance() % 4 == 0) host::pause();  // still ready: a turn for others
  const T before = *at;
  *at = before + addend;
  return before;
}

template <class T> T atomicMax(T* at, T other) {
  if (host::shuffled && host::chance() % 4 == 0) host::pause();
  const T before = *at;
  if (other > before) *at = other;
  return before;
}

inline int __popc(unsigned word) { return __builtin_popcount(word); }
inline int __ffs(int word) { return __builtin_ffs(word); }
inline unsigned __float_as_uint(float value) { return host::bits<unsigned>(value); }
inline float __uint_as_float(unsigned word) { return host::bits<float>(word); }
inline long long __double_as_longlong(double value) { return host::bits<long long>(value); }
inline double __longlong_as_double(long long word) { return host::bits<double>(word); }

inline float half_to_float(unsigned short half) {
  const int exponent = half >> 10 & 31, mantissa = half & 1023;
  const float sign = half >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
  return sign * (exponent ? std::ldexp((float)(1024 + mantissa), exponent - 25)
                          : std::ldexp((float)mantissa, -24));
}
inline unsigned short double_to_half(double value) {
  const unsigned short sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return 0x7fff;
  const double size = std::fabs(value);
  if (size >= 65520.0) return sign | 0x7c00;
  if (size == 0) return sign;
  int exponent = 0;
  std::frexp(size, &exponent);
  const int unit = (exponent < -13 ? -13 : exponent) - 11;  // the last place, as a power of two
  const long places = std::lrint(std::ldexp(size, -unit));  // to nearest, ties to even
  // A mantissa that rounds up to 2048 carries into the exponent by itself.
  return sign | (unsigned short)(((unit + 24) << 10) + places);
}
inline unsigned short float_to_half(float value) { return double_to_half(value); }

inline float added(float a, float b) { return a + b; }
inline float multiplied(float a, float b) { return a * b; }
inline float divided(float a, float b) { return a / b; }
inline double in_double(float value) { return value; }
inline void narrow_to(float& narrow, double value) { narrow = (float)value; }
