#pragma once

// See docs/glossary.md: unit.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/asynchronous/push_order.h"
#include "planner/measured/step_profile.h"
#include "planner/modes/mode_clock.h"
#include "sharding/layout/plan/memory_plan.h"
#include "tessera/existing.h"

namespace tessera::app {

/// The order of pushes and pulls of a simulated run, in the form of sync.record_order. Ranks that play this order
/// (sync.play_order) get the losses that the simulated ranks would get, however long their own steps take.
///
/// The simulation has no shards: a rank pulls, and pushes, all values at one moment (ModeEvent). The order therefore
/// has the events of all shards of a pull, or of a push, one after the other. All shards get the same order, and each
/// gradient has the age of ModeTimeline::ages at every shard. The order in which a program reads its units has no
/// effect.
///
/// The first line has the number of steps of each rank, since ranks that differ make different numbers of steps. Each
/// rank of `tessera train` makes its number of steps.
class SimulatedOrder {
 public:
  /// `profile` has the units that a step uses. `servers` is the number of parameter servers, if servers own the shards.
  /// Errors: 78 if the ranks of the plan do not push gradients by themselves, or if they join and leave during the run;
  /// 65 if the profile is of another model.
  static absl::StatusOr<SimulatedOrder> make(const MemoryPlan& plan, const StepProfile& profile, int servers);

  /// Passes the lines of the run to `write`, one after the other, and ends with the first error that `write` returns.
  absl::Status write_lines(const ModeTimeline& timeline,
                           const std::function<absl::Status(std::string_view)>& write) const;
  /// Writes the lines to a file. Errors are those of an output file (OutputFile).
  absl::Status write_file(const ModeTimeline& timeline, const std::string& path, Existing existing) const;

  std::span<const ShardName> shards() const { return shards_; }

 private:
  OrderParties parties_;
  std::vector<ShardName> shards_;
};

}  // namespace tessera::app
