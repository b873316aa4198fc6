#pragma once

#include <vector>

#include "runtime/config/placement_rows.h"
#include "tessera/strategy.h"

namespace tessera::testing {

/// Returns every legal placement.
inline std::vector<PlacementConfig> legal_placements() {
  constexpr CutAxes kAxes[] = {{}, {.rank = true}, {.host = true}, {.host = true, .rank = true}};
  std::vector<PlacementConfig> legal;
  for (const CutAxes parameters : kAxes) {
    for (const CutAxes gradients : kAxes) {
      for (const CutAxes optimizer : kAxes) {
        if (problem_of({parameters, gradients, optimizer}).empty()) legal.push_back({parameters, gradients, optimizer});
      }
    }
  }
  return legal;
}

/// Returns a strategy that has this placement and otherwise the defaults. It is used for messages and for tests of
/// layouts.
inline Strategy strategy_placed_as(const PlacementConfig& placement) {
  Strategy strategy;
  strategy.placement = placement;
  return strategy;
}

}  // namespace tessera::testing
