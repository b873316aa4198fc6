#pragma once

#include <cstddef>

namespace tessera {

// stream_bytes writes past the caches, with non-temporal stores. A plain store into memory that no cache holds first
// reads the line that it overwrites. Non-temporal stores do not read the line, so memory that is only written costs one
// transfer instead of two. Non-temporal stores are faster if the data are too large to be still in cache when they are
// read next. They are also faster if the next reader is a core that gets a line from memory sooner than from the
// writer's cache. Otherwise they are slower.

/// Least number of bytes for which a call that streams is faster: half of a 2 MiB second-level cache.
constexpr std::size_t kStreamBytes = 1 << 20;

/// Copies past the caches. The writer must call `end_stream` before it tells a reader that the data are there.
/// REQUIRES: no overlap.
void stream_bytes(void* to, const void* from, std::size_t bytes);
void end_stream();

/// Copies a small amount of data that was just written. It uses plain stores, so other cores can read the copy from
/// cache. REQUIRES: no overlap.
void keep_bytes(void* to, const void* from, std::size_t bytes);
/// Copies one part of a larger block, for callers that do other work between the block's parts. It prefetches 2 KiB
/// ahead, beyond the end of the part.
void load_bytes(void* to, const void* from, std::size_t bytes);

/// Copies bytes. It streams if `bytes` is large, and ends the stream before it returns.
void copy_large(void* to, const void* from, std::size_t bytes);

}  // namespace tessera
