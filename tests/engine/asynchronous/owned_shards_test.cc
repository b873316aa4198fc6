// Tests the shards that asynchronous ranks own together, without an Engine: after pushes and pulls in any order, values
// have the same bits as after the same work in plain LibTorch on one thread.

#include "engine/asynchronous/owned_shards.h"

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "engine/memory/make_plan.h"
#include "runtime/comm/shared/run_ranks.h"
#include "sharding/partition.h"
#include "tessera/elementwise_optimizer.h"
#include "tessera/error.h"
#include "tests/engine/asynchronous/order_lines.h"
#include "tests/engine/asynchronous/shard_rank.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace owned_shards_test {

using ::testing::HasSubstr;

/// Returns the square root rounded to nearest; LibTorch's root for fp32 is sometimes off by a unit in the last place.
at::Tensor exact_root(const at::Tensor& x) { return x.to(at::kDouble).sqrt().to(at::kFloat); }

/// Computes what the shards should hold, in plain LibTorch on one thread, with flat tensors of all groups.
class Oracle {
 public:
  explicit Oracle(const Strategy& strategy) : strategy_(strategy) {
    torch::nn::Sequential module = make_module();
    for (const auto& unit : partition(*module, strategy, kRanks, nullptr, nullptr)) {
      for (const auto& group : unit->groups) {
        if (!group->trainable) continue;
        Group& added = groups_[{unit->name, group->index}];
        order_.push_back(&added);
        added.values = at::empty({group->layout.numel()});
        for (std::int64_t i = 0; i < added.values.numel(); ++i) added.values.data_ptr<float>()[i] = first_value(i);
        for (int rank = 0; rank < kRanks; ++rank) added.of.push_back(added.values.clone());
        added.first = at::zeros_like(added.values);
        added.second = at::zeros_like(added.values);
        added.mean_squares = at::zeros_like(added.values);
        added.versions.resize(kRanks);
        added.pulled.resize(kRanks, std::vector<std::int64_t>(kRanks));
      }
    }
  }

  void play(const std::vector<OrderLine>& lines) {
    for (const OrderLine& line : lines) {
      Group& group = groups_.at({line.unit, line.group});
      const std::int64_t part = group.values.numel() / kRanks, begin = line.owner * part;
      const auto rank = static_cast<std::size_t>(line.rank), owner = static_cast<std::size_t>(line.owner);
      const auto cut = [&](const at::Tensor& flat) { return flat.narrow(0, begin, part); };
      EXPECT_EQ(line.version, group.versions[owner]);
      if (!line.is_push) {
        cut(group.of[rank]).copy_(cut(group.values));
        group.pulled[rank][owner] = group.versions[owner];
        continue;
      }
      at::Tensor made = at::empty({part});
      for (std::int64_t i = 0; i < part; ++i) made.data_ptr<float>()[i] = noise(line.rank, line.step, begin + i);
      const AsynchronousConfig& config = strategy_.sync.asynchronous;
      const std::int64_t age = group.versions[owner]++ - group.pulled[rank][owner];
      oldest = std::max(oldest, age);
      const at::Tensor pulled = cut(group.of[rank]), now = cut(group.values);
      const float younger = config.scale == AgeScale::kInverse ? 1.0F / static_cast<float>(1 + age) : 1.0F;
      at::Tensor g = pulled * 0.25F + made;
      if (config.delay_compensation.lambda == 0) {
        g = g * (0.5F * younger);
      } else {
        g = g * 0.5F;
        g = (g + lambdas(cut(group.mean_squares), g) * g * g * (now - pulled)) * younger;
      }
      update(now, cut(group.first), cut(group.second), g, group.versions[owner]);
    }
  }

  std::vector<float> values() const {
    std::vector<float> all;
    for (const Group* group : order_) {
      const auto* const values = group->values.const_data_ptr<float>();
      all.insert(all.end(), values, values + group->values.numel());
    }
    return all;
  }
  std::int64_t oldest = 0;

 private:
  struct Group {
    at::Tensor values, first, second, mean_squares;
    std::vector<at::Tensor> of;  ///< [rank]: the values that the rank pulled
    std::vector<std::int64_t> versions;
    std::vector<std::vector<std::int64_t>> pulled;
  };

  /// Returns lambda of each element. An adaptive lambda also updates the mean of squares.
  at::Tensor lambdas(at::Tensor mean_squares, const at::Tensor& g) const {
    const DelayCompensationConfig& config = strategy_.sync.asynchronous.delay_compensation;
    const at::Tensor lambda = at::full_like(g, config.lambda);
    if (!config.adaptive) return lambda;
    mean_squares.copy_(mean_squares * static_cast<float>(config.decay) +
                       g * g * static_cast<float>(1.0 - config.decay));
    return lambda / exact_root(mean_squares + 1e-7F);
  }

  void update(at::Tensor weight, at::Tensor first, at::Tensor second, const at::Tensor& g, std::int64_t count) const {
    const OptimizerConfig& config = strategy_.optimizer;
    const auto lr = static_cast<float>(config.lr);
    const double decay = config.weight_decay;
    if (config.type == OptimizerType::kSgd) {
      const at::Tensor with_decay = g + weight * static_cast<float>(decay);
      first.copy_(count == 1 ? with_decay : first * static_cast<float>(config.momentum) + with_decay);
      weight.copy_(weight - first * lr);
      return;
    }
    const double beta1 = config.beta1, beta2 = config.beta2, root = std::sqrt(1.0 - power_of(beta2, count));
    const auto step_size = static_cast<float>(static_cast<double>(lr) * root / (1.0 - power_of(beta1, count)));
    first.copy_(first + (g - first) * static_cast<float>(1.0 - beta1));
    second.copy_(second * static_cast<float>(beta2) + g * g * static_cast<float>(1.0 - beta2));
    weight.copy_(weight * static_cast<float>(1.0 - static_cast<double>(lr) * decay) -
                 first * step_size / (exact_root(second) + static_cast<float>(config.eps * root)));
  }

  const Strategy strategy_;
  std::map<std::pair<std::string, std::size_t>, Group> groups_;
  std::vector<const Group*> order_;
};

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<float> run(const Strategy& strategy, int steps) {
  std::vector<float> values;
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Rank rank(mesh, strategy);
    for (int i = 0; i < steps; ++i) rank.step();
    std::vector<float> own = rank.values();
    if (mesh.rank() == 0) values = std::move(own);
  });
  return values;
}

const std::pair<OptimizerType, AsynchronousConfig> kOptions[] = {
    {OptimizerType::kSgd, {}},
    {OptimizerType::kAdamW, {}},
    {OptimizerType::kSgd, {.scale = AgeScale::kInverse}},
    {OptimizerType::kSgd, {.delay_compensation = {.lambda = 1.5}}},
    {OptimizerType::kAdamW, {.scale = AgeScale::kInverse, .delay_compensation = {.lambda = 0.5}}},
    {OptimizerType::kSgd, {.delay_compensation = {.lambda = 0.5, .adaptive = true, .decay = 0.75}}},
    {OptimizerType::kSgd, {.max_staleness = 1}},
    {OptimizerType::kAdamW, {.max_staleness = 0}}};

TEST(OwnedShards, RecordedOrderEqualsPlainLibTorchThatPlaysIt) {
  for (const auto& [type, config] : kOptions) {
    const TestFolder folder;
    Strategy strategy = strategy_of(type, config);
    strategy.sync.asynchronous.record_order = folder / "order";
    const std::vector<float> got = run(strategy, 8);
    Oracle oracle(strategy);
    oracle.play(read_lines(folder / "order"));
    EXPECT_TRUE(same_bits(got, oracle.values())) << name_of(type);
  }
}

TEST(OwnedShards, RandomOrdersEqualPlainLibTorch) {
  const TestFolder folder;
  std::int64_t oldest = 0;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    const std::size_t option = seed % 6;
    const auto& [type, config] = kOptions[option];
    SCOPED_TRACE("option " + std::to_string(option) + ", seed " + std::to_string(seed));
    Strategy strategy = strategy_of(type, config);
    const std::string recorded = folder / std::to_string(option);
    if (seed == option) {
      strategy.sync.asynchronous.record_order = recorded;
      run(strategy, 5);
      strategy.sync.asynchronous.record_order.clear();
    }
    const std::vector<OrderLine> order = counted(shuffled(read_lines(recorded), kRanks, seed));
    write_lines(folder / "random", kRanks, order);
    strategy.sync.asynchronous.play_order = folder / "random";
    const std::vector<float> got = run(strategy, 5);
    Oracle oracle(strategy);
    oracle.play(order);
    EXPECT_TRUE(same_bits(got, oracle.values()));
    oldest = std::max(oldest, oracle.oldest);
  }
  EXPECT_GT(oldest, kRanks) << "some rank was far behind";
}

TEST(OwnedShards, RanksWithoutStalenessPushInRankOrder) {
  const TestFolder folder;
  Strategy strategy = strategy_of(OptimizerType::kSgd, {.max_staleness = 0});
  strategy.sync.asynchronous.record_order = folder / "order";
  const std::vector<float> first = run(strategy, 6);
  std::map<std::tuple<std::string, std::size_t, int>, std::vector<int>> pushes;
  for (const OrderLine& line : read_lines(folder / "order")) {
    if (line.is_push) {
      pushes[{line.unit, line.group, line.owner}].push_back(line.rank);
    } else {
      EXPECT_EQ(line.version, (line.step - 1) * kRanks);
    }
  }
  for (const auto& [shard, ranks] : pushes) {
    for (std::size_t i = 0; i < ranks.size(); ++i) EXPECT_EQ(ranks[i], static_cast<int>(i) % kRanks);
    EXPECT_EQ(ranks.size(), 6U * kRanks);
  }
  EXPECT_TRUE(same_bits(run(strategy, 6), first));
}

TEST(OwnedShards, MemoryEqualsThePlan) {
  run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
    Rank rank(mesh, strategy_of(OptimizerType::kAdamW, {}));
    EXPECT_EQ(rank.shards().memory_bytes(), rank.plan().use()[MemoryCategory::kOptimizer]);
    EXPECT_EQ(rank.plan().passes().outer.states, rank.plan().passes().outer.part);
    rank.values();
    Rank adaptive(mesh, strategy_of(OptimizerType::kAdamW, {.delay_compensation = {.lambda = 1, .adaptive = true}}));
    EXPECT_EQ(adaptive.shards().memory_bytes(), adaptive.plan().use()[MemoryCategory::kOptimizer]);
    EXPECT_EQ(adaptive.plan().passes().outer.states, 2 * adaptive.plan().passes().outer.part);
    adaptive.values();
  });
}

TEST(OwnedShards, PlanWithServersHasTheirShardsAndStatesForCheckpointsAlone) {
  const Strategy strategy = strategy_of(
      OptimizerType::kAdamW,
      {.owners = ShardOwners::kServers, .delay_compensation = {.lambda = 1, .adaptive = true, .decay = 0.75}});
  torch::nn::Sequential module = make_module();
  const auto units = partition(*module, strategy, kRanks, nullptr, nullptr);
  PlanScene scene{MeshPosition{1, kRanks, 0, 0}};
  scene.sync = strategy.sync;
  const MemoryPlan plan = make_plan(units, strategy, scene, *make_optimizer(strategy.optimizer));
  std::int64_t numel = 0;
  for_each_trainable(units, [&](const FlatGroup& group) { numel += group.layout.numel(); });
  EXPECT_EQ(plan.served_bytes().shards, 4 * numel * 4);  // values, two states, mean squares
  EXPECT_EQ(plan.served_bytes().sent, 4 * numel * 2);
  EXPECT_EQ(plan.served_bytes().received, 4 * numel);
  EXPECT_EQ(plan.use()[MemoryCategory::kOptimizer], 4 * 2 * numel / kRanks);
  EXPECT_THAT(plan.to_table(), HasSubstr("servers: the shards of all parameter servers have"));
  EXPECT_THAT(plan.to_table(), HasSubstr("of gradients that wait for its push"));
}

TEST(OwnedShards, PlanOfReplicasHasARanksShareOfTheBytesAndOnlyWholeReplicas) {
  const auto plan_with = [](std::int64_t replica_ranks) {
    const Strategy strategy =
        strategy_of(OptimizerType::kAdamW, {.owners = ShardOwners::kServers, .replica_ranks = replica_ranks});
    torch::nn::Sequential module = make_module();
    const auto units = partition(*module, strategy, kRanks, nullptr, nullptr);
    PlanScene scene{MeshPosition{1, kRanks, 0, 0}};
    scene.sync = strategy.sync;
    return make_plan(units, strategy, scene, *make_optimizer(strategy.optimizer));
  };
  const MemoryPlan alone = plan_with(1), together = plan_with(kRanks);
  EXPECT_EQ(together.served_bytes().shards, alone.served_bytes().shards);
  EXPECT_EQ(kRanks * together.served_bytes().sent, alone.served_bytes().sent);
  EXPECT_EQ(kRanks * together.served_bytes().received, alone.served_bytes().received);
  EXPECT_EQ(together.to_table().find("of gradients that wait for its push"), std::string::npos);
  EXPECT_THROW(plan_with(2), Error);
}

TEST(OwnedShards, FailedRankIsNamedByThoseWhoWaitForIt) {
  std::string error;
  try {
    run_ranks({.ranks = kRanks}, [](const Mesh& mesh) {
      Rank rank(mesh, strategy_of(OptimizerType::kSgd, {.max_staleness = 0}));
      if (mesh.rank() == 1) return;
      rank.step();
    });
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  EXPECT_THAT(error, HasSubstr("rank 1 has left"));
}

/// An update rule that holds a shard's lock until the test lets the rule end.
class StandingStill final : public ElementwiseOptimizer {
 public:
  std::vector<std::string> states() const override { return {}; }
  void update(Elements&) const override {
    has_begun = true;
    has_begun.notify_all();
    may_end.wait(false);
  }
  mutable std::atomic<bool> has_begun = false, may_end = false;
};

TEST(OwnedShards, StoppedHolderOfAShardIsNamedAfterTheTimeout) {
  const auto still = std::make_shared<StandingStill>();
  run_ranks({.ranks = kRanks}, [&](const Mesh& mesh) {
    Rank rank(mesh, strategy_of(OptimizerType::kSgd, {}), /*timeout_s=*/0.3);
    if (mesh.rank() == 1) {
      rank.step_by(ShardRule(strategy_of(OptimizerType::kOwn, {}), OwnRules::of(still), rank.rates()));
      return;
    }
    still->has_begun.wait(false);
    if (mesh.rank() == 0) {
      std::string error;
      try {
        rank.step();
      } catch (const Error& caught) {
        error = caught.what();
        EXPECT_EQ(caught.exit_code(), ExitCode::kPeerLost);
      }
      EXPECT_THAT(error, HasSubstr("rank 0/3 "));
      EXPECT_THAT(error, HasSubstr("of shard 1: timed out waiting for rank 1 (pid " + std::to_string(getpid()) +
                                   "), which holds this shard"));
      still->may_end = true;
      still->may_end.notify_all();
    }
    still->may_end.wait(false);
  });
}

}  // namespace owned_shards_test
}  // namespace tessera::testing
