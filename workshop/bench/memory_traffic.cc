#include "workshop/bench/memory_traffic.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tessera {
namespace {

constexpr std::size_t kLine = 64, kAhead = 1024;

struct Line {
  std::uint64_t words[8];
};

Line load(const std::byte* from) {
  __builtin_prefetch(from + kAhead);
  Line line;
  std::memcpy(&line, from, kLine);
  return line;
}

void combine(Line& line, const Line& other) {
  for (int i = 0; i < 8; ++i) line.words[i] ^= other.words[i];
}

void store(std::byte* to, const Line& line, bool past_caches) {
#if defined(__x86_64__)
  if (past_caches) {
    for (std::size_t i = 0; i < kLine; i += 16) {
      __m128i part;
      std::memcpy(&part, reinterpret_cast<const std::byte*>(&line) + i, 16);
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), part);
    }
    return;
  }
#endif
  std::memcpy(to, &line, kLine);
}

}  // namespace

void cause_traffic(const MemoryTraffic& traffic, std::span<const std::byte* const> from, std::span<std::byte* const> to,
                   bool past_caches) {
  for (std::size_t at = 0; at + kLine <= traffic.bytes; at += kLine) {
    Line line{};
    for (int k = 0; k < traffic.reads; ++k) combine(line, load(from[k] + at));
    for (int k = 0; k < traffic.writes; ++k)
      for (int part = 0; part < traffic.growth; ++part)
        store(to[k] + at * traffic.growth + part * kLine, line, past_caches);
  }
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace tessera
