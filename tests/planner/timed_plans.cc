#include "tests/planner/timed_plans.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace tessera::testing {
namespace {

UnitShape unit_of(const std::string& name, std::int64_t numel, int parts, DType dtype = DType::kF32) {
  return {name, {{dtype, true, Layout::pack({&numel, 1}, parts)}}};
}

std::int64_t any(std::mt19937_64& random, std::int64_t least, std::int64_t most) {
  return std::uniform_int_distribution<std::int64_t>(least, most)(random);
}

/// Draws a time whose logarithm has a uniform distribution.
double any_seconds(std::mt19937_64& random, double least, double most) {
  return std::exp(std::uniform_real_distribution<double>(std::log(least), std::log(most))(random));
}

Links any_links(std::mt19937_64& random) {
  const double alpha = any(random, 0, 2) == 0 ? 0 : any_seconds(random, 1e-6, 1e-3);
  Links links = links_of(any_seconds(random, 1e-11, 1e-7), alpha);
  links.all_reduce.beta_s_per_byte *= 1.3;
  if (any(random, 0, 3) == 0) links.sum_s_per_byte = links.all_reduce.beta_s_per_byte * any_seconds(random, 0.01, 2);
  if (any(random, 0, 3) == 0) links.cpu_s_per_byte = links.all_gather.beta_s_per_byte * any_seconds(random, 0.01, 2);
  if (any(random, 0, 3) == 0) {
    for (OperationFit* fit : {&links.all_gather, &links.reduce_scatter, &links.all_reduce})
      fit->busy_beta_s_per_byte = fit->beta_s_per_byte * any_seconds(random, 1, 2);
  }
  if (any(random, 0, 2) == 0) {
    const double per_byte = links.all_gather.beta_s_per_byte;
    links.coding = {per_byte * any_seconds(random, 0.01, 2), per_byte * any_seconds(random, 0.01, 2),
                    per_byte * any_seconds(random, 0.01, 2), any_seconds(random, 0.01, 1)};
  }
  const std::int64_t way = any(random, 0, 3);
  links.reduces_in_background = way < 2;
  links.gathers_in_background = way == 1 || way == 2;
  return links;
}

void any_times(std::mt19937_64& random, StepProfile& profile) {
  for (ProfileEntry& entry : profile.entries) entry.seconds = any_seconds(random, 1e-5, 1e-1);
  profile.update_seconds = any_seconds(random, 1e-4, 1e-1);
  profile.rest_seconds = any_seconds(random, 1e-6, 1e-2);
}

void any_compression(std::mt19937_64& random, PlanInput& input) {
  const auto form = [&] { return static_cast<WireForm>(any(random, 0, 3)); };
  input.wire.compression.gradients = form();
  input.wire.compression.sums = form();
  input.wire.compressed_shard_part = input.wire.compressed_replicate_part = 1;
  input.wire.gathers = form();
  input.wire.replica_gathers = form();
}

/// Changes a profile as activation recomputation does: each unit is used once more, immediately before its backward.
void recompute(std::vector<ProfileEntry>& entries) {
  std::vector<ProfileEntry> all;
  for (const ProfileEntry& entry : entries) {
    if (entry.pass == RoundPass::kBackward) all.push_back({entry.unit, RoundPass::kForward, 0});
    all.push_back(entry);
  }
  entries = all;
}

}  // namespace

PredictedStep TimedPlan::predicted() const {
  const auto step = predict_step(plan(), profile, links);
  EXPECT_TRUE(step.ok()) << step.status();
  return step.ok() ? *step : PredictedStep();
}

Links links_of(double beta_s_per_byte, double alpha_s) {
  const OperationFit fit{alpha_s, beta_s_per_byte};
  return {.transport = "gloo", .all_gather = fit, .reduce_scatter = fit, .all_reduce = fit, .small = fit};
}

Links shared_memory_links(double beta_s_per_byte, double alpha_s) {
  Links links = links_of(beta_s_per_byte, alpha_s);
  links.transport = "host";
  links.reduces_in_background = links.gathers_in_background = false;
  return links;
}

TimedPlan timed_plan(ShardingStrategy strategy, MeshPosition mesh, int blocks, std::int64_t block_numel) {
  TimedPlan timed;
  PlanInput& input = timed.input;
  input.placement = placement_of(strategy, false);
  input.placement.mesh = mesh;
  input.wire.reduces_in_background = true;
  input.units.push_back(unit_of("(root)", 1024L * mesh.world_size(), mesh.world_size()));
  for (int i = 0; i < blocks; ++i)
    input.units.push_back(unit_of("blocks." + std::to_string(i), block_numel, mesh.world_size()));
  std::vector<ProfileEntry>& entries = timed.profile.entries;
  for (const UnitShape& unit : input.units) entries.push_back({unit.name, RoundPass::kForward, 1});
  for (auto unit = input.units.rbegin(); unit != input.units.rend(); ++unit)
    entries.push_back({unit->name, RoundPass::kBackward, 2});
  for (const UnitShape& unit : input.units) timed.profile.updated_elements += unit.trainable_numel();
  timed.profile.update_seconds = 3;
  timed.profile.rest_seconds = 0.5;
  timed.links = {links_of(0), links_of(0)};
  return timed;
}

std::vector<StrategyCase> all_strategies() {
  return {{"NO_SHARD", ShardingStrategy::kNoShard, {1, 4, 0, 0}},
          {"NO_SHARD, two axes", ShardingStrategy::kNoShard, {2, 2, 0, 0}},
          {"SHARD_OPTIMIZER", ShardingStrategy::kShardOptimizer, {1, 4, 0, 0}},
          {"SHARD_GRADIENTS", ShardingStrategy::kShardGradients, {1, 4, 0, 0}},
          {"SHARD_GRADIENTS, two axes", ShardingStrategy::kShardGradients, {2, 2, 0, 0}},
          {"SHARD_GRAD_OP", ShardingStrategy::kShardGradOp, {1, 4, 0, 0}},
          {"FULL_SHARD", ShardingStrategy::kFullShard, {1, 4, 0, 0}},
          {"HYBRID_SHARD", ShardingStrategy::kHybridShard, {2, 4, 0, 0}},
          {"HYBRID_SHARD of one", ShardingStrategy::kHybridShard, {4, 1, 0, 0}},
          {"HYBRID_SHARD over the world", ShardingStrategy::kHybridShard, {4, 2, 0, 0}, true}};
}

TimedPlan timed_plan(const StrategyCase& strategy, int blocks, std::int64_t block_numel) {
  TimedPlan timed = timed_plan(strategy.strategy, strategy.mesh, blocks, block_numel);
  timed.input.placement = placement_of(strategy.strategy, strategy.over_world);
  return timed;
}

RandomPlan random_plan(std::mt19937_64& random) {
  const std::vector<StrategyCase> strategies = all_strategies();
  const StrategyCase strategy = strategies[static_cast<std::size_t>(any(random, 0, std::ssize(strategies) - 1))];
  RandomPlan result{timed_plan(strategy, static_cast<int>(any(random, 1, 7))), ""};
  TimedPlan& timed = result.timed;
  PlanInput& input = timed.input;
  for (std::size_t i = 1; i < input.units.size(); ++i)
    input.units[i] = unit_of(input.units[i].name, any(random, 256, 1 << 20), input.placement.mesh.world_size());
  input.placement.prefetch = any(random, 0, 3);
  input.wire.accumulation = any(random, 1, 3);
  if (any(random, 0, 1)) input.wire.sync = GradientSync::kLastMicrobatch;
  if (any(random, 0, 1)) input.wire.reductions_ahead = any(random, 0, 4);
  if (any(random, 0, 1)) input.wire.reduce = DType::kBF16;
  if (any(random, 0, 3) == 0) any_compression(random, input);
  timed.links = {any_links(random), any_links(random)};
  input.wire.reduces_in_background =
      timed.links.shard.reduces_in_background || timed.links.replicate.reduces_in_background;
  if (any(random, 0, 4) == 0) input.placement = share_parameters(input.placement);
  if (any(random, 0, 4) == 0 && input.wire.accumulation == 1) input.update.in_backward = true;
  any_times(random, timed.profile);
  if (any(random, 0, 2) == 0) recompute(timed.profile.entries);
  result.text = fmt::format(
      "{}, {} units, prefetch {}, accumulation {}, sync {}, ahead {}, {}, forms {} {} {} {}, shared {}, in backward "
      "{}\nshard {}replicate {}profile {}",
      strategy.name, input.units.size(), input.placement.prefetch, input.wire.accumulation,
      static_cast<int>(input.wire.sync), input.wire.reductions_ahead.value_or(-1), name_of(input.wire.reduce),
      static_cast<int>(input.wire.compression.gradients), static_cast<int>(input.wire.compression.sums),
      static_cast<int>(input.wire.gathers), static_cast<int>(input.wire.replica_gathers), input.placement.shared,
      input.update.in_backward, to_json(timed.links.shard), to_json(timed.links.replicate), to_json(timed.profile));
  return result;
}

double alone_s(const PredictedWire& wire) { return wire.latency_s + wire.transfer_s; }

}  // namespace tessera::testing
