#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/asynchronous/host_copies.h"
#include "engine/asynchronous/owned_shards.h"
#include "engine/device/accelerator.h"
#include "engine/memory/make_plan.h"
#include "engine/memory/training_memory.h"
#include "runtime/border/throw.h"
#include "runtime/comm/local/local_collectives.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/partition.h"

namespace tessera::testing::owned_shards_test {

inline constexpr int kRanks = 3;

inline Strategy strategy_of(OptimizerType type, const AsynchronousConfig& config) {
  Strategy strategy;
  strategy.strategy = ShardingStrategy::kShardOptimizer;
  strategy.optimizer.type = type;
  strategy.optimizer.lr = 0.05;
  if (type == OptimizerType::kSgd) strategy.optimizer.momentum = 0.9;
  strategy.sync.type = SyncType::kAsynchronous;
  strategy.sync.asynchronous = config;
  strategy.units.classes = {"Linear"};
  fill_in_defaults(strategy.optimizer);
  return strategy;
}

inline torch::nn::Sequential make_module(std::int64_t hidden = 41) {
  return torch::nn::Sequential(torch::nn::Linear(23, hidden), torch::nn::Linear(hidden, 7));
}

/// first_value returns the value of element `i` before the first step. noise returns a number; a gradient is a share of
/// the value plus this number.
inline float first_value(std::int64_t i) { return static_cast<float>(i % 17) * 0.125F - 1.0F; }
inline float noise(int rank, std::int64_t step, std::int64_t i) {
  return static_cast<float>((i * 7 + rank * 13 + step * 29) % 31) * 0.03125F - 0.5F;
}

/// A rank without an Engine: memory, shards, and a gradient that depends on the values that were pulled.
class Rank {
 public:
  /// `hidden` is the number of outputs of the module's first layer.
  Rank(const Mesh& mesh, const Strategy& strategy, double timeout_s = 60, std::int64_t hidden = 41)
      : rank_(mesh.rank()),
        module_(make_module(hidden)),
        units_(partition(*module_, strategy, kRanks, nullptr, nullptr)),
        optimizer_(make_optimizer(strategy.optimizer)),
        rates_(strategy.optimizer),
        rule_(strategy, OwnRules{}, rates_) {
    PlanScene scene{MeshPosition{1, kRanks, 0, rank_}};
    scene.sync = strategy.sync;
    plan_ = make_plan(units_, strategy, scene, *optimizer_);
    axes_.gather = axes_.reduce = axes_.replicate = axes_.world = axes_.control =
        std::make_shared<LocalCollectives>(0, 1, /*one_host=*/false);
    memory_ = TrainingMemory::allocate(plan_, units_, axes_, Accelerator(), {});
    for_each_trainable(units_, [](FlatGroup& group) {
      for (std::int64_t i = 0; i < group.layout.numel(); ++i) reinterpret_cast<float*>(group.full)[i] = first_value(i);
    });
    board_ = std::make_unique<PeerBoard>(value_or_throw(groups_of(mesh).world("asynchronous")), timeout_s);
    copies_ = std::make_unique<HostCopies>(units_, plan_, Accelerator(), rank_, /*readers=*/nullptr);
    shards_ = std::make_unique<OwnedShards>(units_, plan_, *board_, *copies_);
  }

  GradientAges step() { return step_by(rule_); }
  GradientAges step_by(const ShardRule& rule) {
    ++step_;
    for (auto& unit : units_) shards_->pull(*unit);
    std::size_t parameters = 0;
    for_each_trainable(units_, [&](FlatGroup& group) {
      parameters += group.parameters.size();
      const auto* const values = reinterpret_cast<const float*>(group.full);
      for (std::int64_t i = 0; i < group.layout.numel(); ++i)
        group.gradient[i] = values[i] * 0.25F + noise(rank_, step_, i);
    });
    const std::vector<char> used(parameters, 1);
    return shards_->push(rule, {{.gradient_scale = 0.5F, .lr = rates_.everybodys()}, used});
  }

  /// Returns the newest values of all groups, one after the other. The call is collective.
  std::vector<float> values() {
    shards_->bring_together();
    std::vector<float> all;
    for_each_trainable(units_, [&](const FlatGroup& group) {
      const auto* const values = reinterpret_cast<const float*>(group.full);
      all.insert(all.end(), values, values + group.layout.numel());
    });
    return all;
  }
  OwnedShards& shards() { return *shards_; }
  const std::vector<std::unique_ptr<Unit>>& units() const { return units_; }
  const LearningRates& rates() const { return rates_; }
  const MemoryPlan& plan() const { return plan_; }

 private:
  const int rank_;
  torch::nn::Sequential module_;
  std::vector<std::unique_ptr<Unit>> units_;
  std::unique_ptr<Optimizer> optimizer_;
  LearningRates rates_;
  ShardRule rule_;
  MemoryPlan plan_;
  MeshAxes axes_;
  TrainingMemory memory_;
  std::unique_ptr<PeerBoard> board_;
  std::unique_ptr<HostCopies> copies_;
  std::unique_ptr<OwnedShards> shards_;
  std::int64_t step_ = 0;
};

}  // namespace tessera::testing::owned_shards_test
