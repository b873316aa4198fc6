#pragma once

#include <cstddef>

namespace tessera {

// Writing past the caches (non-temporal stores). A store into memory that no cache holds first reads the line it
// overwrites; these do not, so what is only written costs one transfer instead of two. They pay where the data is too
// much to be still in cache when it is read next, or is read by a core that a line of cache reaches later than memory does; and cost
// where it is not.

/// From so many bytes on, written by one call, streaming is the faster: half of a 2 MiB second-level cache.
constexpr std::size_t kStreamBytes = 1 << 20;

/// memcpy past the caches. A reader of what was written needs `end_stream` of the writer before it is told.
/// REQUIRES: no overlap.
void stream_bytes(void* to, const void* from, std::size_t bytes);
void end_stream();

/// Copies little that was just written, by plain stores, for other cores to read from cache. REQUIRES: no overlap.
void keep_bytes(void* to, const void* from, std::size_t bytes);
/// The same of a part of something larger in memory, between whose parts other work is done: asks for what lies 2 KiB ahead, beyond
/// the end of the part.
void load_bytes(void* to, const void* from, std::size_t bytes);

/// memcpy that streams where `bytes` is large, and is over when it returns.
void copy_large(void* to, const void* from, std::size_t bytes);

}  // namespace tessera
