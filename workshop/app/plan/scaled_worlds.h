#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "planner/predicted_step.h"
#include "tessera/strategy.h"
#include "tessera/topology.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"

namespace tessera::app {

/// A number of ranks, and the step that is predicted for it. Each rank has the same work as on one rank.
struct ScaledWorld {
  static constexpr int kMostRanks = 4096;

  int ranks = 1, hosts = 1;
  PredictedStep step = {};
  std::optional<double> alone_s = {};  ///< seconds of a step of one rank; empty: the strategy does not allow one rank

  /// Returns the speed-up by Gustafson's law (tessera/scaling.h), from the share of the step that a rank communicates.
  double scaled_speedup() const;
  double scaling_efficiency() const;
  /// Returns the efficiency compared with the seconds of one rank's step: the share of its speed that is left. It
  /// includes the cost of the cores that transport takes, and the gain of updates that ranks share.
  std::optional<double> efficiency_beside_one() const;
};

/// Returns the strategy on 1 to kMostRanks ranks: powers of two up to the ranks that `asked` has on a host, then full
/// hosts, whose number doubles each time, and `asked` itself. Numbers of ranks that the strategy does not allow are
/// left out. Throws tessera::Error as predicted_step does.
std::vector<ScaledWorld> scaled_worlds(const ModelShapes& model, const Strategy& strategy, const Topology& asked,
                                       const TimingFiles& files);

/// Returns a table for readers.
std::string to_text(std::span<const ScaledWorld> worlds);
nlohmann::ordered_json to_json(std::span<const ScaledWorld> worlds);

}  // namespace tessera::app
