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

/// A number of ranks, and the step that is predicted for this number. Each rank has the same work as a single rank has.
struct ScaledWorld {
  static constexpr int kMostRanks = 4096;

  int ranks = 1, hosts = 1;
  PredictedStep step = {};
  std::optional<double> alone_s = {};  ///< seconds of a step of one rank; empty: the strategy does not allow one rank

  /// Returns the speed-up by Gustafson's law (tessera/scaling.h), from the share of the step in which a rank
  /// communicates.
  double scaled_speedup() const;
  double scaling_efficiency() const;
  /// Returns the efficiency compared with the step of a single rank: the share of the single rank's speed that each
  /// rank still has. It includes the cost of the cores that the transport takes, and the gain from updates that ranks
  /// share.
  std::optional<double> efficiency_beside_one() const;
};

/// Returns the predictions for the strategy on 1 to kMostRanks ranks. The numbers of ranks are powers of two up to one
/// full host of `asked`. Then the number of full hosts doubles each time. The number of ranks of `asked` is also among
/// them. Numbers that the strategy does not allow are left out. Throws tessera::Error as predicted_step does.
std::vector<ScaledWorld> scaled_worlds(const ModelShapes& model, const Strategy& strategy, const Topology& asked,
                                       const TimingFiles& files);

/// Returns a table for readers.
std::string to_text(std::span<const ScaledWorld> worlds);
nlohmann::ordered_json to_json(std::span<const ScaledWorld> worlds);

}  // namespace tessera::app
