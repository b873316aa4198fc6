#pragma once

// See docs/glossary.md: agreement, publication, unit.

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "planner/measured/step_profile.h"
#include "planner/script_writer.h"
#include "sharding/layout/plan/step_program.h"

namespace tessera {

/// The part of a step's program (StepProgram) that is agreement, the update of this rank's part, and publishing updated
/// values: what CpuStep, Update and Publisher do, without the time it takes. A group is published (all-gathered) when
/// it is updated. So its all-gather goes on while the next group is updated, or while the next forward begins if values
/// are published behind the update (Publication).
class UpdateScript {
 public:
  /// All arguments must outlive this object. `publishes_behind`: StepInput::publishes_behind.
  UpdateScript(const MemoryPlan& plan, const StepProfile& profile, bool publishes_behind, ScriptWriter& writer);

  /// Ranks tell each other loss, norm and so on.
  void agree();
  /// Ranks tell each other the norms of a unit's layers, in backward.
  void agree_on_norms(int unit);
  /// Takes a group's turn: the group is updated, and published too.
  void update(const Visit& visit);
  /// This is called when an operator reads `unit`. It waits for the published values of the unit.
  void use(int unit);
  /// Waits for everything that was published.
  void wait_for_published();
  /// Makes a barrier of ranks that share one copy of the parameters.
  void meet();

 private:
  void publish(const GroupShape& group, int unit);
  std::int64_t agreement_bytes() const;
  CallCost world_cost(std::int64_t message_bytes) const;

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  ScriptWriter& writer_;
  const bool publishes_behind_;
  std::vector<const GroupShape*> groups_;  ///< groups that train, in unit order
  std::deque<int> under_way_;
  std::vector<std::vector<int>> behind_;  ///< [unit]: its calls
};

}  // namespace tessera
