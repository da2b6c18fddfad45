// Choose the instruction set: the widest that this processor has.
#include "scan.hpp"

#include <atomic>
#include <cstring>

#include "abi.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gtopk {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports("f16c") does not compile before GCC 11 and clang 17. That the system saves
// the registers, the check for "avx2" ensures.
bool has_f16c() {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Whether the processor has every feature that the functions of a set are compiled for.
bool available(const Instructions& set) {
#if defined(__x86_64__)
  if (&set == &avx512) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           available(avx2);
  }
  if (&set == &avx2) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt") && has_f16c();
  }
#endif
  return &set == &portable;
}

const Instructions* const by_width[] = {
#if defined(__x86_64__)
    &avx512, &avx2,
#endif
    &portable};

const Instructions* widest() {
  for (const Instructions* set : by_width) {
    if (available(*set)) return set;
  }
  return &portable;
}

std::atomic<const Instructions*> chosen{widest()};

}  // namespace

const Instructions& instructions() { return *chosen.load(std::memory_order_relaxed); }

}  // namespace gtopk

GTOPK_API const char* instructions_in_use() { return gtopk::instructions().name; }

// For tests: use the instruction set of this name, and return 1; 0 if the processor lacks it.
GTOPK_API std::int64_t use_instructions(const char* name) {
  for (const gtopk::Instructions* set : gtopk::by_width) {
    if (std::strcmp(set->name, name) == 0 && gtopk::available(*set)) {
      gtopk::chosen = set;
      return 1;
    }
  }
  return 0;
}
