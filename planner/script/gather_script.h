#pragma once

// See docs/glossary.md: residency, slot, unit.

#include <cstdint>
#include <vector>

#include "planner/script/script_writer.h"
#include "sharding/layout/schedule.h"

namespace tessera {

/// Writes a step's gathers of units into a script, and the waits for them, in the order of Residency. A unit is
/// gathered at its first use, or before it if the Schedule requires this. If no slot is empty, the unit whose next use
/// is farthest away loses its slot.
///
/// It writes nothing if no gather sends data: with one rank, or with one copy in shared memory.
class GatherScript {
 public:
  explicit GatherScript(const MemoryPlan& plan);

  /// Uses unit `index`: waits for its gather, and begins the gathers of units that follow.
  void use(int index, ScriptWriter& writer);
  /// Ends a round (forward and backward of one microbatch).
  void end_round();
  /// Begins the next step's first gathers at the end of this step, if the transport can gather in the background.
  void gather_ahead(ScriptWriter& writer);
  /// Releases all units. It is called when the step's update has changed the parameters.
  void release_all(ScriptWriter& writer);

 private:
  enum class State : std::uint8_t { kReleased, kGathering, kGathered };
  static constexpr int kNoSlot = -1;
  struct Unit {
    State state = State::kReleased;
    int slot = kNoSlot;
    bool is_posted = false;
    bool has_copy = false;        ///< whether the second copy of the parameters is up to date
    std::vector<int> calls = {};  ///< numbers of calls for which no rank has waited yet
  };

  Unit& unit(int index) { return units_[static_cast<std::size_t>(index)]; }
  const UnitShape& shape(int index) const { return plan_.units()[static_cast<std::size_t>(index)]; }
  bool keeps() const { return plan_.placement().keep_gathered; }
  void gather(int index, ScriptWriter& writer);
  void post(int index, ScriptWriter& writer);
  void post_inside(int index, ScriptWriter& writer);
  void end_calls(int index, const Links& links, ScriptWriter& writer);
  void wait(int index, ScriptWriter& writer);
  void release(int index, ScriptWriter& writer);
  void prefetch(ScriptWriter& writer);
  bool fits(int index, int slot) const { return (slot == 0) == (index == 0); }
  int find_slot(int index, bool early);

  const MemoryPlan& plan_;
  const bool is_needed_;
  std::vector<Unit> units_;
  std::vector<int> holders_;  ///< [slot]: index of the unit in the slot, or -1 if it is empty; first the root's slot,
                              ///< then the shared slots
  Schedule schedule_;
  int last_ = -1;
};

}  // namespace tessera
