#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "planner/measured/step_profile.h"
#include "planner/script_writer.h"
#include "sharding/layout/plan/step_program.h"

namespace tessera {

/// What a step's program (StepProgram) has of agreement, of the update of this rank's part, and of what makes updated values known: what
/// CpuStep, Update and Publisher do, with times left out. A group is published when it is updated, so its all-gather goes on while the next
/// group is updated, and where values are published behind the update while the next forward begins (Publication).
class UpdateScript {
 public:
  /// All outlive this. `publishes_behind`: StepInput::publishes_behind.
  UpdateScript(const MemoryPlan& plan, const StepProfile& profile, bool publishes_behind, ScriptWriter& writer);

  /// Ranks tell each other loss, norm and the like.
  void agree();
  /// A group's turn, in which it is published too.
  void update(const Visit& visit);
  /// An operator reads `unit`: what was published of it is waited for.
  void use(int unit);
  /// Waits for all that was published.
  void wait_for_published();
  /// Ranks that share one copy of the parameters wait for each other.
  void meet();

 private:
  void publish(const GroupShape& group, int unit);
  std::int64_t agreement_bytes() const;
  CallCost world_cost(std::int64_t message_bytes) const;

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  ScriptWriter& writer_;
  const bool publishes_behind_;
  std::vector<const GroupShape*> groups_;  ///< those that train, in the order of units
  std::deque<int> under_way_;
  std::vector<std::vector<int>> behind_;  ///< calls, by unit
};

}  // namespace tessera
