// The C interface to Python: a C name for each combination of value and index type.
#pragma once

#include <cstdint>
#include <new>

#define GTOPK_API extern "C" __attribute__((visibility("default")))

namespace gtopk {

// Returned when memory ran out; Python raises MemoryError.
constexpr std::int64_t OUT_OF_MEMORY = -1;

// Run a body, and keep its exceptions from Python.
template <class Body>
std::int64_t guarded(Body body) noexcept {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return OUT_OF_MEMORY;
  }
}

}  // namespace gtopk
