#pragma once

// See docs/glossary.md: placement.

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "planner/predicted_step.h"
#include "sharding/layout/plan/memory_plan.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// The content of the files that --links, --links-inside and --profile name.
struct TimingFiles {
  StepProfile profile;
  Links links;
  std::optional<Links> links_inside;
  int servers = 0;  ///< TimingOptions::servers

  /// Returns the links of both axes of a plan with this placement. An axis whose ranks are all on one host gets
  /// `links_inside`, if that is not empty. Any other axis gets `links` (Links::of_group). The ranks that hold a second
  /// copy of the parameters together get their links by the same rule.
  MeshLinks links_of(const PlannedPlacement& placement, int ranks_per_host) const;
};
/// Reads the files. Throws tessera::Error.
TimingFiles read_timing(const TimingOptions& options);
/// Throws tessera::Error (64) if --servers is given and the strategy has no parameter servers.
void expect_servers(const TimingFiles& files, const SyncConfig& sync);
/// Returns the predicted step of ranks that wait for each other. Throws tessera::Error: 65 if the measurements are of
/// another model; 78 if ranks have clocks of their own (mode_cost_of); 64 as expect_servers does.
PredictedStep predicted_step(const MemoryPlan& plan, const TimingFiles& files, int ranks_per_host);

/// Returns a text for readers: the seconds of a step and its parts.
std::string to_text(const PredictedStep& step);
nlohmann::ordered_json to_json(const PredictedStep& step);

}  // namespace tessera::app
