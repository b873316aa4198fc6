#pragma once

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

/// What decides a plan beside units and strategy.
struct PlanScene {
  MeshPosition mesh;
  bool shares_memory = false;          ///< do the ranks of a shard group?
  bool is_queued = false;              ///< PlanInput::is_queued
  bool reduces_in_background = false;  ///< PlanInput::reduces_in_background
  /// Of each axis's group: Collectives::compressed_part.
  int shard_compressed_part = 0, replicate_compressed_part = 0;
  SyncConfig sync = {};                              ///< in effect; then `mesh` is that of a replica
  int replicas = 1;                                  ///< PlanInput::replicas, where there are outer steps
  std::optional<OffloadedStep> offloaded_step = {};  ///< what OffloadConfig::step "auto" was measured to be
};
/// Whether gradients go over a network in another form than they have.
bool compresses(const CompressionConfig& compression);

MemoryPlan make_plan(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const PlanScene& scene,
                     const Optimizer& optimizer);

/// Throws (exit code 78) with the table and the next cheaper strategy that fits, if the plan exceeds memory.limit.
void check_memory_limit(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory);

/// "SHARD_GRADIENTS with 12.00 MiB": the least sharded strategy whose plan needs at most `limit` bytes; empty if none does.
std::string next_cheaper(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory, std::int64_t limit);

/// A message for a device that is out of memory: `what`, then the plan, its largest unit, the activations of the first
/// step if they are known, and what would need less memory.
std::string explain_out_of_memory(const std::string& what, const MemoryPlan& plan, const Strategy& strategy,
                                  bool shares_memory, std::optional<std::int64_t> activation_bytes);

}  // namespace tessera
