#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "app/commands.h"
#include "sharding/layout/memory_plan.h"
#include "sharding/timing/predicted_step.h"

namespace tessera::app {

/// What --links, --links-inside and --profile name. Throws tessera::Error.
struct TimingFiles {
  StepProfile profile;
  MeshLinks links;
};
/// `mesh`: of the plan. An axis whose ranks are all on one host takes --links-inside, where that is given, the other --links.
TimingFiles read_timing(const TimingOptions& options, const MeshPosition& mesh, int ranks_per_host);

/// For people: seconds of a step and where they go.
std::string to_text(const PredictedStep& step);
nlohmann::ordered_json to_json(const PredictedStep& step);

}  // namespace tessera::app
