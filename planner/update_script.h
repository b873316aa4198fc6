#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <vector>

#include "planner/measured/step_profile.h"
#include "planner/script_writer.h"

namespace tessera {

/// What a step does behind its last backward: the agreement, the update of this rank's part, and what makes updated
/// values known: what CpuStep, Update and Publisher do, with times left out. A group is published when it is updated,
/// so its all-gather goes on while the next group is updated, and where nothing is updated in backward while the next forward begins
/// (Publication).
class UpdateScript {
 public:
  /// All outlive this.
  UpdateScript(const MemoryPlan& plan, const StepProfile& profile, ScriptWriter& writer);

  /// Whether forward waits for what the step before published. Then its update comes first.
  bool publishes_behind() const { return publishes_behind_; }

  /// Ranks tell each other loss, norm and the like.
  void agree();
  void update_all();
  void update(int unit);
  /// An operator reads `unit`: what was published of it is waited for.
  void use(int unit);
  /// Ends what was started to make values known.
  void finish();

 private:
  void publish(const GroupShape& group, int unit);
  std::int64_t agreement_bytes() const;
  CallCost world_cost(std::int64_t message_bytes) const;

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  ScriptWriter& writer_;
  const bool publishes_behind_;
  std::deque<int> under_way_;
  std::vector<std::vector<int>> behind_;  ///< calls, by unit
};

}  // namespace tessera
