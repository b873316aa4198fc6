#pragma once

// See docs/glossary.md: residency, unit.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/arena.h"
#include "sharding/unit.h"

namespace tessera {

/// This rank's parts of a second copy of the parameters, which some neighbours on the shard axis hold together
/// (MemoryPlan::has_secondary). A unit that was gathered over the whole axis is kept here, and gathered from here until
/// its values change. So only the first gather of a step goes over the network.
///
/// A rounded copy holds codes of runtime/comm/sum/wire_codec.h. Then the first use of a step gets the rounded values
/// too: what `keep` was given is replaced by what `finish` decodes.
///
/// Residency owns it and calls it, on the thread that runs forward and backward. All ranks of `group` call it for the
/// same units in the same order.
class SecondaryShards {
 public:
  /// The memory that the plan says: `parts` of MemoryPlan::secondary_bytes, which the group's transport reads, and
  /// `codes` of MemoryPlan::secondary_codes_bytes.
  struct Memory {
    Arena parts, codes;
  };

  /// `group`: the ranks that hold one copy (MeshAxes::secondary). `plan`, `units` and `group` must outlive this object.
  SecondaryShards(const MemoryPlan& plan, const std::vector<Unit*>& units, Collectives& group, Memory memory);

  /// Returns whether the copy has the values of `unit`.
  bool has(const Unit& unit) const { return has_[static_cast<std::size_t>(unit.index)] != 0; }
  /// Keeps this rank's part of a unit whose values are all in FlatGroup::full, if the copy holds that unit. On a GPU
  /// the part is copied on the current stream, behind the gather that was waited for. A rounded copy is for the CPU
  /// alone.
  void keep(const Unit& unit);
  /// Begins to gather a unit to FlatGroup::full, and adds to `works` what is to be waited for before `finish`.
  void start(const Unit& unit, std::vector<Work>& works);
  /// Ends the gather of a unit that the copy has, also one that was just kept. A rounded copy is gathered and decoded
  /// here. Throws tessera::Error if a call fails.
  void finish(const Unit& unit);

  /// The values of `unit`, or of all units, have changed: they are gathered over the whole axis next.
  void forget(const Unit& unit) { has_[static_cast<std::size_t>(unit.index)] = 0; }
  void forget_all() { has_.assign(has_.size(), 0); }

 private:
  struct Part {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
  };
  const Part& part_of(const FlatGroup& group) const {
    return parts_[static_cast<std::size_t>(group.unit->index)][group.index];
  }
  bool is_rounded(const FlatGroup& group) const { return plan_.rounds_secondary(group.dtype); }

  const MemoryPlan& plan_;
  Collectives& group_;
  Memory memory_;
  std::vector<std::vector<Part>> parts_;  ///< [unit index][group]; none where the copy does not hold the unit
  std::vector<char> has_;                 ///< [unit index]: not 0 if the copy has the unit's values
};

}  // namespace tessera
