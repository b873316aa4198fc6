#pragma once

// See docs/glossary.md: residency, unit.

#include <cstddef>
#include <cstdint>

namespace tessera {

struct FlatGroup;
class Unit;

/// Brings a rank's parts of units to memory, where they do not lie in it (offloaded parameters). A gather begins with
/// it. Residency calls it on the thread that runs forward and backward.
class ShardSource {
 public:
  virtual ~ShardSource() = default;
  /// Begins to bring this rank's part of a group to `memory` [parameter_part], without waiting. `memory` belongs to the
  /// source until `finish`; on the CPU it begins at a page. Throws tessera::Error.
  virtual void start(const FlatGroup& group, std::byte* memory) = 0;
  /// Waits for everything that was started for `unit`; on a GPU it makes later queued work wait. If it
  /// throws, nothing is under way any more either. Throws tessera::Error: 74 if something could not be read, 65 if it
  /// came back with other bytes.
  virtual void finish(const Unit& unit) = 0;

  /// Returns the bytes copied to a GPU so far.
  virtual std::int64_t uploaded_bytes() const { return 0; }
  /// Returns the bytes of pinned host memory for those copies.
  virtual std::int64_t pinned_bytes() const { return 0; }
};

}  // namespace tessera
