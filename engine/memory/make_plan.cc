#include "engine/memory/make_plan.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <variant>

#include "engine/memory/expect_reproducible.h"
#include "optim/master_assigner.h"
#include "optim/muon_optimizer.h"
#include "runtime/base/bytes.h"
#include "runtime/base/text.h"
#include "runtime/border/throw.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_names.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/layout/plan/tier_choice.h"

namespace tessera {

// This file makes the memory plan of a strategy for the ranks of a job.
//
// `make_plan` first refuses a strategy that does not fit these ranks (the `expect_...` functions). It then fills the
// parts of PlanInput, chooses tiers within the memory limit, and refuses strategies with faults that only the plan
// shows. `next_cheaper` plans the other strategies, for the remedy in errors of too little memory.

namespace {

/// Returns the placement as it is on these ranks: the ranks of a shard group may share one copy of the parameters.
Placement placement_on(Placement placement, const Strategy& strategy, const MeshPosition& mesh, bool shares_memory) {
  if (mesh.replicate_size == 1) placement.optimizer.replicate_first = false;  // an axis of one rank cuts nothing
  // Where ranks train common parameters, each rank has its own copy of the values from forward to backward, except with
  // Hogwild.
  const bool keeps_own = strategy.sync.has_common_parameters() && !strategy.sync.is_hogwild();
  const bool one_copy = strategy.host_sharing && shares_memory && mesh.shard_size > 1;
  return one_copy && !keeps_own ? share_parameters(placement) : placement;
}

/// Throws if the CPU is to update a GPU's state (`"offload.step"`: `"cpu"`) and cannot do so. The CPU updates only
/// state that lies in the host's memory.
void expect_step_on_host(const MemoryPlan& plan) {
  if (plan.can_step_on_host()) return;
  if (plan.passes_twice()) {
    throw Error(
        ExitCode::kConfig,
        "/offload/step: \"cpu\" updates each element once its gradient is there, and this optimizer.type goes over "
        "masters and moments twice, or over whole matrices first. [T0227] hint: take \"gpu\"");
  }
  if (plan.has_whole_records()) {
    throw Error(ExitCode::kConfig,
                "/offload/step: \"cpu\" updates a GPU's parameters where they lie, in its memory or its host's, and "
                "here they lie in files. [T0228] hint: give parameters the tier \"host\", or take \"gpu\"");
  }
  throw Error(ExitCode::kConfig,
              "/offload/step: \"cpu\" updates elements whose masters and moments both lie in the host's memory, and "
              "here some have one of them there and the other on the GPU. [T0229] hint: give masters and moments the "
              "tier \"host\" and one fraction, or take \"gpu\"");
}

/// Throws if "noise_scale" is set and a step has one microbatch on one rank. The estimate of the noise needs the
/// gradient of a batch that is smaller than the step's batch.
void expect_small_batches(const Strategy& strategy, const PlanScene& scene) {
  if (strategy.noise_scale.every == 0) return;
  if (scene.mesh.world_size() * strategy.gradient_accumulation > 1) return;
  throw Error(
      ExitCode::kConfig,
      "/noise_scale/every: one rank with one microbatch a step has no smaller batch than the whole to compare it "
      "with; where \"sync\" makes outer steps, a replica's ranks count. [T0833] hint: take a "
      "gradient_accumulation above 1, or several ranks");
}

/// Throws if "mesh" has several replicas, but the ranks own the parameters together
/// (SyncConfig::has_common_parameters). Such ranks need a mesh of one replica.
void expect_one_replica(const PlanScene& scene) {
  if (!scene.sync.has_common_parameters() || scene.mesh.replicate_size == 1) return;
  throw Error(
      ExitCode::kConfig,
      c10::str(
          "/mesh/shard: asynchronous and hogwild (\"sync\"), and backups, need a mesh of one replica, since every rank "
          "is one already and shards lie over all ranks, got ",
          scene.mesh.replicate_size, " replicas. [T0893] hint: leave \"mesh\" out, or give it \"host\": 1"));
}

/// Throws if "sync" backups would leave no rank that takes part in a step.
void expect_enough_ranks(const PlanScene& scene) {
  const std::int64_t ranks = scene.mesh.world_size();
  if (scene.sync.type != SyncType::kBackups || scene.sync.backups < ranks) return;
  throw Error(ExitCode::kConfig,
              c10::str("/sync/count: a step would wait for none of ", counted(ranks, "rank"), ", since ",
                       scene.sync.backups, " are backups. [T0899] hint: give a count below the number of ranks"));
}

/// Throws if the number of ranks is no multiple of the number of ranks of a replica (sync.replica_ranks).
void expect_whole_replicas(const PlanScene& scene) {
  const std::int64_t group = scene.mesh.world_size(), ranks = scene.sync.asynchronous.replica_ranks;
  if (group % ranks == 0) return;
  throw Error(ExitCode::kConfig, "/sync/replica_ranks: " + std::to_string(group) + " ranks do not make replicas of " +
                                     std::to_string(ranks) + ". [T1054] hint: start a multiple of sync.replica_ranks");
}

/// Returns the second copy of the parameters that the strategy asks for on these ranks. Throws if no gather would use
/// this copy, or if the number of ranks that hold it does not fit the shard axis.
SecondaryCopy secondary_on(const Strategy& strategy, const PlanScene& scene, const Placement& placement) {
  if (!strategy.secondary.is_used()) return {};
  if (placement.shared)
    throw Error(ExitCode::kConfig,
                "/secondary/form: the ranks of the shard axis hold one copy of the parameters in memory that they "
                "share, and gather nothing. [T0981] hint: leave \"secondary\" out, or set host_sharing to false");
  const std::int64_t shard = scene.mesh.shard_size, given = strategy.secondary.ranks;
  const std::int64_t ranks = given > 0 ? given : scene.ranks_of_host;
  if (ranks == 0)
    throw Error(
        ExitCode::kConfig,
        c10::str("/secondary/ranks: hosts hold unequal numbers of ranks, so a second copy cannot be held by those of a "
                 "host. [T0993] hint: give \"ranks\", a number above 1 and below ",
                 shard, " that divides the shard axis of ", shard, " ranks, or leave \"secondary\" out"));
  if (ranks > 1 && ranks < shard && shard % ranks == 0) return {static_cast<int>(ranks), strategy.secondary.form};
  throw Error(
      ExitCode::kConfig,
      c10::str("/secondary/ranks: a second copy is held by a number of ranks that divides the shard axis, and "
               "is above 1 and below its ",
               shard, ", got ", ranks, given > 0 ? "" : ", those of a host",
               ". [T0982] hint: give such a number; where the whole shard axis is inside a host, leave \"secondary\" "
               "out; with one rank a host, SHARD_GRAD_OP keeps units gathered"));
}

/// Throws if "deal" by speed has nothing to distribute, does not fit deal.longest or the device, or would give ranks
/// different numbers of gathers.
void expect_dealable(const MemoryPlan& plan, const DealConfig& deal) {
  const bool is_dealt = plan.wire().longest_run > 0;
  if (is_dealt && plan.wire().accumulation == 1)
    throw Error(ExitCode::kConfig,
                "/deal/by: one microbatch a rank leaves nothing to deal by speed. [T0900] hint: take more and smaller "
                "microbatches (gradient_accumulation, or deal.microbatches)");
  if (is_dealt && plan.wire().longest_run < plan.wire().accumulation)
    throw Error(
        ExitCode::kConfig,
        c10::str("/deal/longest: is ", deal.longest, ", and some ranks have ", plan.wire().accumulation,
                 " microbatches at first (deal.microbatches). [T0942] hint: take at least that many, or leave it out"));
  if ((is_dealt || deal.microbatches > 0) && plan.placement().is_queued)
    throw Error(
        ExitCode::kConfig,
        "/deal/by: ranks' speeds are measured on the CPU so far, and a GPU trains. [T0901] hint: train on the CPU, or "
        "take \"even\"");
  if (!is_dealt || !plan.gathers()) return;
  throw Error(
      ExitCode::kConfig,
      "/deal/by: speed gives ranks different numbers of microbatches, and here each microbatch gathers "
      "parameters of all ranks, the slow one's too. [T0902] hint: take a strategy whose ranks have whole parameters, "
      "such as SHARD_GRADIENTS, or ranks of one host that share them (host_sharing, FULL_SHARD or "
      "HYBRID_SHARD) and keep them in memory, without offload.parameters");
}

/// Returns the number of units that are gathered ahead: the value of PlannedPlacement::prefetch.
std::int64_t units_ahead(const Strategy& strategy, std::span<const UnitShape> units) {
  if (strategy.prefetch_bytes == 0) return strategy.prefetch;
  std::int64_t largest = 1;
  for (const UnitShape& unit : units.subspan(1)) largest = std::max(largest, unit.gathered_bytes());
  return std::clamp<std::int64_t>(strategy.prefetch_bytes / largest, 1,
                                  std::max<std::int64_t>(std::ssize(units) - 1, 1));
}

}  // namespace

bool compresses(const CompressionConfig& compression) {
  return compression.gradients != WireForm::kPlain || compression.sums != WireForm::kPlain || compression.has_method();
}

MemoryPlan make_plan(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const PlanScene& scene,
                     const Optimizer& optimizer) {
  expect_built_for_device(strategy, scene.is_queued);
  if (strategy.reproducible) expect_reproducible(strategy, scene);
  expect_small_batches(strategy, scene);
  expect_one_replica(scene);
  expect_enough_ranks(scene);
  expect_whole_replicas(scene);
  if (strategy.compression.has_method() && scene.mesh.replicate_size > 1) {
    throw Error(ExitCode::kConfig,
                c10::str("/compression/method: needs a mesh of one replica, whose ranks sum all "
                         "gradients at once, got ",
                         scene.mesh.replicate_size, ". [T0230] hint: leave \"mesh\" out, or give it \"host\": 1"));
  }
  const OptimizerType type = strategy.optimizer.type;
  PlanInput input;
  for (const auto& unit : units) input.units.push_back(unit->shape());
  input.placement = placement_on(placement_of(strategy), strategy, scene.mesh, scene.shares_memory);
  input.placement.mesh = scene.mesh;
  input.placement.secondary = secondary_on(strategy, scene, input.placement);
  input.update.outer = scene.sync;
  if (scene.sync.makes_outer_steps()) input.placement.replicas = scene.replicas;
  input.placement.is_queued = scene.is_queued;
  input.wire.reduces_in_background = scene.reduces_in_background;
  input.wire.reductions_ahead = strategy.reductions_ahead;
  input.placement.prefetch = units_ahead(strategy, input.units);
  input.wire.reduce = strategy.mixed_precision.reduce;
  const MicrobatchOrder order = microbatch_order(strategy, scene.mesh.world_size());
  input.wire.accumulation = order.each;
  input.wire.sync = strategy.gradient_sync;
  input.update.master = strategy.mixed_precision.master;
  input.update.states = optimizer.state_formats();
  if (type == OptimizerType::kMuon) {
    input.update.matrix_states = MuonOptimizer(strategy.optimizer, strategy.ema).state_formats();
  } else {
    input.update.matrix_states = MasterAssigner(strategy.optimizer, strategy.ema).state_formats();
  }
  input.update.matrix_work = {.is_muon = type == OptimizerType::kMuon,
                              .multiplies = !has(type, optimizer_traits::kTensors)};
  input.update.twice = adapts_layers(type);
  input.update.first_pass_moves_states = input.update.twice && makes_direction(rule_of(type));
  input.tiers = strategy.offload;
  input.tiers.paths.clear();
  if (scene.offloaded_step) input.tiers.step = *scene.offloaded_step;
  // A rule that the program defines runs on the device of the model, unless the strategy says something else.
  const bool stays_on_gpu = scene.is_queued && type == OptimizerType::kOwn;
  if (stays_on_gpu && input.tiers.step == OffloadedStep::kAuto) input.tiers.step = OffloadedStep::kGpu;
  input.update.in_backward = strategy.optimizer.in_backward;
  if (strategy.memory.limit_bytes > 0 && !input.tiers.queue_depth) input.tiers.queue_depth = kQueueDepth;
  input.tiers.copies_checkpoints = strategy.checkpoint.async;
  input.tiers.is_durable = strategy.durable.every > 0;
  input.wire.reproducible = strategy.reproducible;
  input.wire.longest_run = order.longest;
  input.wire.backups = order.backups;
  input.wire.microbatches = order.total;
  input.wire.statistics_numel = scene.statistics_numel;
  input.update.checks_values = strategy.check.values;
  input.wire.compression = strategy.compression;
  const WireForm gathers = strategy.compression.gathers;
  if (scene.shard_compressed_part > 0) input.wire.gathers = gathers;
  if (scene.replicate_compressed_part > 0 && input.placement.optimizer.replicate && !is_lossy(gathers))
    input.wire.replica_gathers = gathers;
  if (compresses(strategy.compression)) {
    const CompressedAxes axes = strategy.compression.axes;
    // A hook of the program can make sums over any transport. For a GPU, it makes them in the host's memory.
    const bool is_hook = std::holds_alternative<CommHookConfig>(strategy.compression.method);
    if (axes != CompressedAxes::kReplicate || (scene.is_queued && is_hook))
      input.wire.compressed_shard_part = scene.shard_compressed_part;
    if (axes != CompressedAxes::kShard) input.wire.compressed_replicate_part = scene.replicate_compressed_part;
  }
  input.wire.filling_buckets = strategy.units.bucket_cap_mb ? 2 : 1;
  const std::int64_t limit = strategy.memory.limit_bytes;
  const Tier below = tier_below(strategy.offload, scene.is_queued);
  MemoryPlan plan(with_tiers_chosen(input, limit, below));
  expect_dealable(plan, strategy.deal);
  const bool has_states_of_tensors = plan.records().tensor_states.pinned_bytes > 0;
  if (plan.passes().steps_on_host || (plan.tiers().step == OffloadedStep::kCpu && has_states_of_tensors))
    expect_step_on_host(plan);
  const bool is_open = plan.tiers().step == OffloadedStep::kAuto && plan.records().states.pinned_bytes > 0;
  if (!is_open || limit <= 0 || plan.use().limited() <= limit || !plan.can_step_on_host()) return plan;
  input.tiers.step = OffloadedStep::kCpu;  // this needs less memory of the GPU
  MemoryPlan smaller(with_tiers_chosen(std::move(input), limit, below));
  return smaller.use().limited() <= limit ? smaller : plan;
}

std::string next_cheaper(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory, std::int64_t limit) {
  constexpr ShardingStrategy kFromDearToCheap[] = {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer,
                                                   ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard};
  if (strategy.sync.has_common_parameters()) return "";  // such training works with SHARD_OPTIMIZER alone
  for (ShardingStrategy cheaper : kFromDearToCheap) {
    PlanInput input = plan.input();
    input.placement = placement_on(placement_of(cheaper, strategy.optimizer.shard_over_world), strategy,
                                   input.placement.mesh, shares_memory);
    input.placement.secondary = {};
    const std::int64_t total = MemoryPlan(std::move(input)).use().limited();
    if (total > limit) continue;
    const bool had_copy = plan.placement().secondary.ranks > 0;
    return name_of(cheaper) + (had_copy ? " without \"secondary\"" : "") + " with " + format_bytes(total);
  }
  return "";
}

namespace {

/// Returns the bytes that a unit needs at once while it is computed: its gathered values and its bucket.
std::int64_t peak_of(const UnitShape& unit, const MemoryPlan& plan) {
  return unit.gathered_bytes() + plan.bucket_bytes_of(unit);
}

}  // namespace

void check_memory_limit(const MemoryPlan& plan, const Strategy& strategy, bool shares_memory) {
  const std::int64_t limit = strategy.memory.limit_bytes;
  if (limit <= 0 || plan.use().limited() <= limit) return;
  const std::string cheaper = next_cheaper(plan, strategy, shares_memory, limit);
  const std::string hint = cheaper.empty()
                               ? "[T0231] hint: no strategy fits; take more ranks, a smaller model or bf16 parameters"
                               : "[T0232] hint: the next cheaper strategy that fits is " + cheaper;
  throw Error(ExitCode::kConfig, "/memory/limit: the plan for " + name_of_placement(strategy) + " needs " +
                                     format_bytes(plan.use().limited()) + " a rank, the limit is " +
                                     format_bytes(limit) + ".\n" + plan.to_table() + hint);
}

std::string explain_out_of_memory(const std::string& what, const MemoryPlan& plan, const Strategy& strategy,
                                  bool shares_memory, std::optional<std::int64_t> activation_bytes) {
  const std::vector<UnitShape>& units = plan.units();
  const auto largest = std::max_element(units.begin(), units.end(), [&](const UnitShape& a, const UnitShape& b) {
    return peak_of(a, plan) < peak_of(b, plan);
  });
  std::string text = what + "\nthe plan of " + name_of_placement(strategy) +
                     ", beside which activations have to fit:\n" + plan.to_table();
  if (largest != units.end()) {
    text += "the largest unit is " + largest->name + ": " + format_bytes(largest->gathered_bytes()) + " gathered, " +
            format_bytes(plan.bucket_bytes_of(*largest)) + " of gradients\n";
  }
  if (activation_bytes) text += "activations of the first step: " + format_bytes(*activation_bytes) + "\n";
  const std::string cheaper = next_cheaper(plan, strategy, shares_memory, plan.use().limited() - 1);
  return text + "[T0233] hint: take fewer samples a microbatch, or recomputation, which make activations smaller; " +
         (cheaper.empty() ? "no strategy needs less than this one" : "the next cheaper strategy is " + cheaper);
}

}  // namespace tessera
