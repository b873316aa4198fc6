#include "runtime/comm/sum/streaming.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

// ThreadSanitizer and AddressSanitizer do not see memory that intrinsics write.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define TESSERA_STREAMS 1
#include <immintrin.h>
#endif

namespace tessera {

#ifdef TESSERA_STREAMS
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kAhead = 1024;  // bytes to a prefetched line; hardware prefetchers stop at a page's edge

// Streams whole lines. Every x86-64 processor has SSE2. Four SSE2 stores fill a line's write-combining buffer as well
// as one wider store would.
void stream_lines(std::byte* to, const std::byte* from, std::size_t lines) {
  for (std::size_t i = 0; i < lines; ++i, to += kLine, from += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead, _MM_HINT_T0);
    for (std::size_t k = 0; k < kLine; k += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
  }
}

// Copies line by line. One memcpy of all bytes may use a single instruction (rep movs), which is slower if other cores
// have copies of the lines.
template <bool kAsks>
void copy_lines(std::byte* to, const std::byte* from, std::size_t bytes) {
  constexpr std::size_t kLoadAhead = 2048;
  const std::size_t lines = bytes / kLine * kLine;
  for (std::size_t at = 0; at < lines; at += kLine) {
    if (kAsks) _mm_prefetch(reinterpret_cast<const char*>(from) + at + kLoadAhead, _MM_HINT_T0);
    std::memcpy(to + at, from + at, kLine);
  }
  if (lines < bytes) std::memcpy(to + lines, from + lines, bytes - lines);
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

void keep_bytes(void* to, const void* from, std::size_t bytes) {
  copy_lines<false>(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
}

void load_bytes(void* to, const void* from, std::size_t bytes) {
  copy_lines<true>(static_cast<std::byte*>(to), static_cast<const std::byte*>(from), bytes);
}

#else

void keep_bytes(void* to, const void* from, std::size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}
void load_bytes(void* to, const void* from, std::size_t bytes) { keep_bytes(to, from, bytes); }

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
