#include "runtime/comm/sum/streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// ThreadSanitizer and AddressSanitizer do not see what intrinsics write.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TESSERA_STREAMS 1
#include <immintrin.h>
#endif

namespace tessera {

#ifdef TESSERA_STREAMS
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 1024;  // bytes: the hardware's prefetchers stop at the edge of a page

// Whole lines; SSE2 is on every x86-64, and four stores fill a line's write-combining buffer as well as one.
void stream_lines(std::byte* to, const std::byte* from, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
    for (std::size_t k = 0; k < kLine; k += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
  }
}

}  // namespace

void stream_bytes(void* to, const void* from, std::size_t bytes) {
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t head = std::min(bytes, -reinterpret_cast<std::uintptr_t>(target) % kLine);
  const std::size_t lines = (bytes - head) / kLine, done = head + lines * kLine;
  if (head > 0) std::memcpy(target, source, head);
  stream_lines(target + head, source + head, lines);
  if (done < bytes) std::memcpy(target + done, source + done, bytes - done);
}

void end_stream() { _mm_sfence(); }

void load_bytes(void* to, const void* from, std::size_t bytes) {
  constexpr std::size_t kAhead = 2048, kManyBytes = 32 << 10;
  auto* target = static_cast<std::byte*>(to);
  const auto* source = static_cast<const std::byte*>(from);
  const std::size_t lines = bytes > kManyBytes ? 0 : bytes / kLine * kLine;
  for (std::size_t at = 0; at < lines; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(source) + at + kAhead, _MM_HINT_T0);
    std::memcpy(target + at, source + at, kLine);
  }
  if (lines < bytes) std::memcpy(target + lines, source + lines, bytes - lines);
}

#else

void load_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void stream_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void end_stream() {}

#endif

void copy_large(void* to, const void* from, std::size_t bytes) {
  if (bytes < kStreamBytes) {
    if (bytes > 0) std::memcpy(to, from, bytes);
    return;
  }
  stream_bytes(to, from, bytes);
  end_stream();
}

}  // namespace tessera
