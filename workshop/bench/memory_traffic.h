#pragma once

#include <cstddef>
#include <span>

namespace tessera {

/// The memory traffic that one rank causes in a collective: `reads` streams of `bytes` each, and `writes` streams of
/// `bytes * growth` each (growth 2: bf16 or fp16 in, fp32 out).
struct MemoryTraffic {
  int reads = 0, writes = 0;
  std::size_t bytes = 0;
  int growth = 1;

  std::size_t bytes_read() const { return reads * bytes; }
  std::size_t bytes_written() const { return writes * growth * bytes; }
};

/// Causes only this traffic: each cache line of the streams is read or written once, with all streams at the same time.
/// If `past_caches` is true, stores are non-temporal. The faster kind of stores gives the limit for a collective of
/// this traffic. REQUIRES: `from[k]` has `traffic.bytes` bytes, and `to[k]` has `traffic.bytes * growth` bytes. The
/// streams do not overlap, and all are aligned to 64 bytes.
void cause_traffic(const MemoryTraffic& traffic, std::span<const std::byte* const> from, std::span<std::byte* const> to,
                   bool past_caches);

}  // namespace tessera
