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
/// (MemoryPlan::has_secondary). A unit that was gathered over the whole axis is stored in this copy, and is gathered
/// from the copy until its values change. So only the first gather of a step goes over the network.
///
/// A rounded copy holds quantized values (codes of runtime/comm/sum/wire_codec.h). Even the first use in a step then
/// gets rounded values: `finish` writes the decoded values over the exact values from which `keep` made the copy.
///
/// Residency owns it and calls it, on the thread that runs forward and backward. All ranks of `group` call it for the
/// same units in the same order.
class SecondaryShards {
 public:
  /// The memory, as large as in the plan: `parts` of MemoryPlan::secondary_bytes, which the group's transport reads,
  /// and `codes` of MemoryPlan::secondary_codes_bytes.
  struct Memory {
    Arena parts, codes;
  };

  /// `group` has the ranks that hold one copy (MeshAxes::secondary). `plan`, `units` and `group` must outlive this
  /// object.
  SecondaryShards(const MemoryPlan& plan, const std::vector<Unit*>& units, Collectives& group, Memory memory);

  /// Returns whether the copy has the values of `unit`.
  bool has(const Unit& unit) const { return has_[static_cast<std::size_t>(unit.index)] != 0; }
  /// Keeps this rank's part of a unit whose values are all in FlatGroup::full, if the copy holds that unit. On a GPU
  /// the part is copied on the current stream, which has waited for the gather. A rounded copy is possible only on the
  /// CPU.
  void keep(const Unit& unit);
  /// Begins to gather a unit to FlatGroup::full, and adds to `works` the calls that must be waited for before `finish`.
  void start(const Unit& unit, std::vector<Work>& works);
  /// Completes the gather of a unit that the copy has, including a unit that was just kept. A rounded copy is gathered
  /// and decoded here. Throws tessera::Error if a call fails.
  void finish(const Unit& unit);

  /// It is called when the values of `unit`, or of all units, have changed. Their next gather is over the whole axis.
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
  std::vector<std::vector<Part>> parts_;  ///< [unit index][group]; no entries for a unit that the copy does not hold
  std::vector<char> has_;                 ///< [unit index]: not 0 if the copy has the unit's values
};

}  // namespace tessera
