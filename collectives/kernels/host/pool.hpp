// A thread pool for parallel loops: started at first use, and anew in a forked child.
#pragma once

#include <cstdint>
#include <functional>

namespace gtopk {

// Run body(part, begin, end) for up to `threads` contiguous parts of 0..length, in order of part.
//
//   0        length/3       2 length/3      length
//   |  part 0  |     part 1     |    part 2   |        the calling thread takes part 0
//
// Returns the number of parts. If the pool is busy, or cannot start, the calling thread runs all
// parts in order. Throws std::bad_alloc before any part has begun.
int in_parallel(int threads, std::int64_t length,
                const std::function<void(int part, std::int64_t begin, std::int64_t end)>& body);

}  // namespace gtopk
