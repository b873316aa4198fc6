#pragma once

// See docs/glossary.md: agreement, publication, unit.

#include <cstdint>
#include <deque>
#include <vector>

#include "planner/measured/step_profile.h"
#include "planner/script/script_writer.h"
#include "sharding/layout/plan/step_program.h"

namespace tessera {

/// Writes three parts of a step's program (StepProgram) into a script: the agreement, the update of this rank's part,
/// and the publication of updated values. In a real step, CpuStep, Update and Publisher do this work. A group is
/// published (all-gathered) after its update. Its all-gather over the shard axis proceeds while the next group is
/// updated. If values are published behind the update (Publication), this all-gather proceeds while the next forward
/// begins.
class UpdateScript {
 public:
  /// All arguments must outlive this object. `publishes_behind`: StepInput::publishes_behind.
  UpdateScript(const MemoryPlan& plan, const StepProfile& profile, bool publishes_behind, ScriptWriter& writer);

  /// Writes the agreement, in which ranks exchange the loss, the norm and other values.
  void agree();
  /// Writes the exchange of the norms of a unit's layers, in backward.
  void agree_on_norms(int unit);
  /// Writes the update of a group, and the publication of its values.
  void update(const Visit& visit);
  /// Writes the wait for the published values of `unit`. It is called when an operator reads the unit.
  void use(int unit);
  /// Writes the waits for all published values.
  void wait_for_published();
  /// Writes a barrier of the ranks that share one copy of the parameters.
  void meet();

 private:
  void publish(const GroupShape& group, int unit);
  std::int64_t agreement_bytes() const;
  CallCost world_cost(std::int64_t message_bytes) const;

  const MemoryPlan& plan_;
  const StepProfile& profile_;
  ScriptWriter& writer_;
  const bool publishes_behind_;
  std::vector<const GroupShape*> groups_;  ///< groups with trainable parameters, in the order of units
  std::deque<int> under_way_;
  std::vector<std::vector<int>> behind_;  ///< [unit]: the calls that publish the unit
};

}  // namespace tessera
