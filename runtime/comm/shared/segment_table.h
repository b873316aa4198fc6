#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/shared/control_block.h"
#include "runtime/comm/shared/memory_segment.h"

namespace tessera {

/// The shared segments of a group as one rank maps them. A segment has one part for each rank, and this rank maps all
/// of them. Common memory has only one part. The table is thread-safe, since a CommBuffer may be freed on any thread.
class SegmentTable {
 public:
  explicit SegmentTable(int rank) : rank_(rank) {}

  /// Adds a segment. `parts[q]` is this process's mapping of rank q's part. If `id` has the bit Location::kCommon,
  /// there is only one part. `id` > 0 is the same on all ranks.
  void add(std::uint64_t id, std::vector<MemorySegment> parts);
  void remove(std::uint64_t id);

  std::byte* own_part(std::uint64_t id) const;
  /// Returns the location at which peers find [data, data + bytes), if it lies in one of this rank's parts.
  Location locate(const void* data, std::size_t bytes) const;
  /// Returns this process's mapping of the same place in `peer`'s memory; null if `remove` was called.
  std::byte* view(int peer, const Location& location) const;

 private:
  using Parts = std::vector<MemorySegment>;

  static const MemorySegment& part(std::uint64_t id, const Parts& parts, int rank) {
    return parts[Location{id, 0}.common() ? 0 : rank];
  }
  std::uintptr_t address_of_own(std::uint64_t id, const Parts& parts) const {
    return reinterpret_cast<std::uintptr_t>(part(id, parts, rank_).data());
  }

  const int rank_;
  mutable Mutex mutex_;
  std::map<std::uint64_t, Parts> segments_ ABSL_GUARDED_BY(mutex_);
  std::map<std::uintptr_t, std::uint64_t> by_address_ ABSL_GUARDED_BY(mutex_);  // key: begin of own part; value: id
};

}  // namespace tessera
