// Shared by the wire's codes: unaligned loads and stores, and loops compiled for two processors.
#pragma once

#include <cstdint>
#include <cstring>

#include "scan.hpp"

#define GTOPK_INLINE inline __attribute__((always_inline))

namespace gtopk {

// Returned by an unpacking function for bytes that no packing function writes.
constexpr std::int64_t MALFORMED = -1;

template <class Word>
GTOPK_INLINE Word load(const void* from) {
  Word word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

template <class Word>
GTOPK_INLINE void store(void* to, Word word) {
  std::memcpy(to, &word, sizeof word);
}

// Run a body, compiled for AVX2 if the processor has it. All that it calls must be GTOPK_INLINE.
#if defined(__x86_64__)
template <class Body>
__attribute__((target("avx2,bmi,bmi2,f16c,popcnt"), noinline)) std::int64_t with_avx2(
    const Body& body) {
  return body();
}

template <class Body>
std::int64_t dispatch(const Body& body) {
  return &instructions() == &portable ? body() : with_avx2(body);
}
#else
template <class Body>
std::int64_t dispatch(const Body& body) {
  return body();
}
#endif

}  // namespace gtopk
