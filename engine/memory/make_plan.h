#pragma once

// See docs/glossary.md: tier, unit.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "optim/optimizer.h"
#include "sharding/layout/plan/memory_plan.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// The inputs of a plan other than units and strategy: the ranks, their transport, and the device.
struct PlanScene {
  MeshPosition mesh;
  bool shares_memory = false;          ///< whether the ranks of a shard group share memory
  bool is_queued = false;              ///< PlannedPlacement::is_queued
  bool reduces_in_background = false;  ///< PlannedWire::reduces_in_background
  /// The value of Collectives::compressed_part for the group of each axis.
  int shard_compressed_part = 0, replicate_compressed_part = 0;
  /// the outer steps that are in effect; if there are any, `mesh` is the mesh of one replica
  SyncConfig sync = {};
  int replicas = 1;                                  ///< PlannedPlacement::replicas; used only if there are outer steps
  int ranks_of_host = 1;                             ///< Topology::local_world_size; 0 if hosts have different numbers
                                                     ///< of ranks
  std::int64_t statistics_numel = 0;                 ///< PlannedWire::statistics_numel
  std::optional<OffloadedStep> offloaded_step = {};  ///< the result of the measurement for OffloadConfig::step "auto"
};

/// Returns whether gradients are packed for a network, by a codec or a compressor.
bool compresses(const CompressionConfig& compression);

/// Makes the memory plan of one rank, exact to the byte. It allocates nothing; an Engine calls it before it allocates,
/// and `tessera plan` calls it for jobs that do not run. For "auto" it chooses tiers with which the plan stays within
/// memory.limit, if there are any. Throws tessera::Error (78) if strategy, mesh and device do not fit together.
MemoryPlan make_plan(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const PlanScene& scene,
                     const Optimizer& optimizer);

/// Throws tessera::Error (78) if the plan exceeds memory.limit. The error has the plan's table, and names the next
/// cheaper strategy that fits.
void check_memory_limit(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory);

/// Names a strategy whose plan needs at most `limit` bytes, as in "SHARD_GRADIENTS with 12.00 MiB". If there are
/// several, it names the one that shards least. The text is empty if there is no such strategy. It is also empty if
/// ranks train parameters that they own together (SyncConfig::has_common_parameters), since such training works with
/// SHARD_OPTIMIZER alone.
std::string next_cheaper(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory, std::int64_t limit);

/// Makes the message for a device that is out of memory. It has `what`, the plan, the plan's largest unit, and the
/// activations of the first step if they are known. It ends with a strategy that would need less memory.
std::string explain_out_of_memory(const std::string& what, const MemoryPlan& plan, const Strategy& strategy,
                                  bool shares_memory, std::optional<std::int64_t> activation_bytes);

/// Throws tessera::Error (78) if the strategy wants something that does not exist for the device that trains. `is_gpu`:
/// true if this device is a GPU, false if it is the CPU. The error names the key and says what to do. make_plan calls
/// it first.
void expect_built_for_device(const Strategy& strategy, bool is_gpu);

}  // namespace tessera
