// A few threads that share one loop: started at first use, asleep in between, gone after a fork.
#pragma once

#include <cstdint>
#include <functional>

namespace gtopk {

// Run body(part, begin, end) for up to `threads` contiguous parts of 0..length, in order of part.
//
//   0        length/3       2 length/3      length
//   |  part 0  |     part 1     |    part 2   |        the calling thread takes part 0
//
// Returns the number of parts. Where the pool is busy, or cannot start, the caller runs them all:
// what a body computes may depend on its part only in ways that the parts' order mends. Throws
// std::bad_alloc before any of them has begun.
int in_parallel(int threads, std::int64_t length,
                const std::function<void(int part, std::int64_t begin, std::int64_t end)>& body);

}  // namespace gtopk
