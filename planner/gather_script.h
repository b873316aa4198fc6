#pragma once

#include <cstdint>
#include <vector>

#include "planner/script_writer.h"
#include "sharding/layout/schedule.h"

namespace tessera {

/// Where a step gathers units and waits for them: what Residency does, with times left out. Units are gathered by their
/// first use, or ahead of it where the Schedule says so; a slot is taken from the unit whose next use is farthest away.
///
/// Where nothing is sent (one rank, or one copy in shared memory) nothing is written.
class GatherScript {
 public:
  explicit GatherScript(const MemoryPlan& plan);

  /// Unit `index` is used: it is waited for, and what follows it is gathered ahead.
  void use(int index, ScriptWriter& writer);
  void end_round();
  /// The first gathers of a step are begun at the end of the one before, where the transport goes on with them by itself.
  void gather_ahead(ScriptWriter& writer);
  /// The step's update has changed the parameters.
  void release_all(ScriptWriter& writer);

 private:
  enum class State : std::uint8_t { kReleased, kGathering, kGathered };
  static constexpr int kNoSlot = -1;
  struct Unit {
    State state = State::kReleased;
    int slot = kNoSlot;
    bool is_posted = false;
    std::vector<int> calls = {};  ///< not waited for yet
  };

  Unit& unit(int index) { return units_[static_cast<std::size_t>(index)]; }
  const UnitShape& shape(int index) const { return plan_.input().units[static_cast<std::size_t>(index)]; }
  bool keeps() const { return plan_.input().placement.keep_gathered; }
  void gather(int index, ScriptWriter& writer);
  void post(int index, ScriptWriter& writer);
  void wait(int index, ScriptWriter& writer);
  void release(int index, ScriptWriter& writer);
  void prefetch(ScriptWriter& writer);
  bool fits(int index, int slot) const { return (slot == 0) == (index == 0); }
  int find_slot(int index, bool early);

  const MemoryPlan& plan_;
  const bool is_needed_;
  std::vector<Unit> units_;
  std::vector<int> holders_;  ///< [slot]: the unit in it, or -1; the root's slot, then the shared ones
  Schedule schedule_;
  int last_ = -1;
};

}  // namespace tessera
