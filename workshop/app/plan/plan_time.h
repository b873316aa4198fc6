#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "planner/predicted_step.h"
#include "sharding/layout/plan/memory_plan.h"
#include "workshop/app/commands.h"

namespace tessera::app {

/// What --links, --links-inside and --profile name.
struct TimingFiles {
  StepProfile profile;
  Links links;
  std::optional<Links> links_inside;

  /// `input`: of a plan. An axis whose ranks are all on one host takes `links_inside`, where those are given, the other `links`
  /// (Links::of_group).
  MeshLinks links_of(const PlanInput& input, int ranks_per_host) const;
};
/// Throws tessera::Error.
TimingFiles read_timing(const TimingOptions& options);
/// Throws tessera::Error where the measurements are of another model.
PredictedStep predicted_step(const MemoryPlan& plan, const TimingFiles& files, int ranks_per_host);

/// For people: seconds of a step and where they go.
std::string to_text(const PredictedStep& step);
nlohmann::ordered_json to_json(const PredictedStep& step);

}  // namespace tessera::app
