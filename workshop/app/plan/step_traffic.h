#pragma once

// See docs/glossary.md: flat group, unit.

#include <cstdint>
#include <string>
#include <vector>

#include "sharding/layout/plan/memory_plan.h"

namespace tessera::app {

/// One kind of collective in a step.
struct StepCollective {
  std::string operation;  ///< "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "barrier"
  /// "shard", "replicate", "world" for all ranks of a mesh that has both axes, "secondary" for the ranks that together
  /// hold a second copy of the parameters (MemoryPlan::has_secondary), or "replica" for the ranks that together form
  /// one replica (AsynchronousConfig::replica_ranks)
  std::string axis;
  std::string what;        ///< what is sent, such as "parameters before use"
  std::int64_t calls = 0;  ///< number of calls; a unit's flat groups share a call, except in outer steps
  std::int64_t bytes = 0;  ///< bytes of whole buffers in all calls; a rank sends less
  std::int64_t every = 1;  ///< number of steps from one such collective to the next
};

/// Returns the collectives of one step of a rank, as the engine makes them from its second step on. The rank uses its
/// units in the order of their definition, forward and then backward. Ranks also agree on loss and norm, with one
/// all-gather that has a few bytes for each unit. The result does not have this all-gather.
std::vector<StepCollective> collectives_of_step(const MemoryPlan& plan);

}  // namespace tessera::app
