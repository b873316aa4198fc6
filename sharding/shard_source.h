#pragma once

#include <cstddef>

namespace tessera {

struct FlatGroup;
class Unit;

/// Where a rank's parts of units come from that do not lie in memory: what a gather begins with.
class ShardSource {
 public:
  /// Begins to bring this rank's part of a group to `memory` [parameter_part], without waiting. `memory` begins at a page
  /// and is the source's until `finish`. Throws tessera::Error.
  virtual void start(const FlatGroup& group, std::byte* memory) = 0;
  /// Waits for all that was started for `unit`. Where it throws, nothing is under way any more either. Throws
  /// tessera::Error: 74 if something could not be read, 65 if it came back with other bytes.
  virtual void finish(const Unit& unit) = 0;

 protected:
  ~ShardSource() = default;
};

}  // namespace tessera
