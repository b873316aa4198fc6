#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "planner/mode_world.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"

namespace tessera::app {

/// Returns the costs of a step if each rank has its own clock ("sync" asynchronous, hogwild, backups), or if replicas
/// meet at outer steps. Throws tessera::Error: 65 if the measurements are of another model; 64 if TimingOptions name
/// servers but the strategy has none.
ModeCost mode_cost_of(const PlannedWorld& world, const TimingFiles& files);

/// Returns the number of ranks that have their own clock. If replicas meet at outer steps, it is the number of
/// replicas.
int ranks_of_mode(const MemoryPlan& plan);

/// Steps of ranks that are alike. Each step has as many gradients as there are ranks.
struct AlikeSteps {
  double seconds = 0;  ///< seconds of one step
  double staleness_mean = 0;
};
/// Throws tessera::Error (64) for more ranks than can be simulated.
AlikeSteps steps_of_alike(const ModeCost& cost, int ranks);

/// Returns a text for readers: the seconds of a rank's step and its parts, and the parts that are not counted.
std::string to_text(const ModeCost& cost, const AlikeSteps& alike);
nlohmann::ordered_json to_json(const ModeCost& cost, const AlikeSteps& alike);

}  // namespace tessera::app
