#pragma once

#include <cstddef>
#include <cstdint>

namespace tessera {

struct FlatGroup;
class Unit;

/// Where a rank's parts of units come from that do not lie in memory: what a gather begins with.
class ShardSource {
 public:
  virtual ~ShardSource() = default;
  /// Begins to bring this rank's part of a group to `memory` [parameter_part], without waiting. `memory` is the source's until `finish`; on
  /// the CPU it begins at a page. Throws tessera::Error.
  virtual void start(const FlatGroup& group, std::byte* memory) = 0;
  /// Waits for all that was started for `unit`; on a GPU, what is queued from then on waits. Where it throws, nothing is under way any more either. Throws
  /// tessera::Error: 74 if something could not be read, 65 if it came back with other bytes.
  virtual void finish(const Unit& unit) = 0;

  /// Copied to a GPU so far.
  virtual std::int64_t uploaded_bytes() const { return 0; }
  /// Pinned memory of its host, for copies.
  virtual std::int64_t pinned_bytes() const { return 0; }
};

}  // namespace tessera
