#pragma once

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

  /// Returns the links of both axes of the plan that has `input`. An axis whose ranks are all on one host gets
  /// `links_inside`, if there are some; the other axis gets `links` (Links::of_group).
  MeshLinks links_of(const PlanInput& input, int ranks_per_host) const;
};
/// Reads the files. Throws tessera::Error.
TimingFiles read_timing(const TimingOptions& options);
/// Throws tessera::Error (78) where no step's time can be told: ranks are asynchronous.
void expect_predictable(const MemoryPlan& plan);
/// Throws tessera::Error where the measurements are of another model.
PredictedStep predicted_step(const MemoryPlan& plan, const TimingFiles& files, int ranks_per_host);

/// Returns the text for people: seconds of a step and where they go.
std::string to_text(const PredictedStep& step);
nlohmann::ordered_json to_json(const PredictedStep& step);

}  // namespace tessera::app
