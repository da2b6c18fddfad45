// Stream: write large vectors past the caches, as an ordinary store first reads the cache line.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace gtopk {

// Only vectors of at least so many bytes: smaller ones may still be in a cache when read next.
constexpr std::int64_t STREAMED_BYTES = std::int64_t{64} << 20;

#if defined(__x86_64__)
constexpr std::uintptr_t LINE_BYTES = 64;

// Copy `count` bytes, or write zeros if `from` is null. Call `end_stream` afterwards.
inline void stream(char* to, const char* from, std::size_t count) {
  const auto put = [&](std::size_t bytes) {
    if (from) {
      std::memcpy(to, from, bytes);
      from += bytes;
    } else {
      std::memset(to, 0, bytes);
    }
    to += bytes;
    count -= bytes;
  };
  const std::uintptr_t off = reinterpret_cast<std::uintptr_t>(to) % LINE_BYTES;
  put(std::min<std::size_t>(count, (LINE_BYTES - off) % LINE_BYTES));
  for (; count >= LINE_BYTES; to += LINE_BYTES, count -= LINE_BYTES) {
    for (std::size_t at = 0; at < LINE_BYTES; at += 16) {
      const __m128i value = from ? _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at))
                                 : _mm_setzero_si128();
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), value);
    }
    if (from) from += LINE_BYTES;
  }
  put(count);
}

// Make streamed data visible to other threads before later stores.
inline void end_stream() { _mm_sfence(); }
#else
inline void stream(char* to, const char* from, std::size_t count) {
  from ? std::memcpy(to, from, count) : std::memset(to, 0, count);
}
inline void end_stream() {}
#endif

}  // namespace gtopk
