// Tests gradients in fewer bits over a network. Ranks are processes that Gloo joins.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <tuple>
#include <utility>

#include "runtime/comm/shared/run_ranks.h"
#include "tests/engine/on_hosts.h"
#include "tests/support/pairwise.h"

namespace tessera::testing {
namespace compression_test {

Adjust compressed(WireForm gradients, WireForm sums = WireForm::kPlain, bool feedback = false) {
  return [=](Strategy& strategy) {
    strategy.compression = {.gradients = gradients, .sums = sums, .error_feedback = feedback};
  };
}

constexpr std::size_t kSteps = 4;

// The strategies cut gradients into parts in different ways, and reduce them by different calls.
TEST(Compression, EveryStrategyGivesTheSameBits) {
  for (const auto& [ranks, form] : {std::pair(2, WireForm::kInt4), {3, WireForm::kInt8}}) {
    on_hosts(ranks, ranks, [&, form = form](const Mesh& mesh) {
      FirstValues first;
      const Values exact = trained(mesh, strategy_for(ShardingStrategy::kFullShard), kSteps);
      for (const ShardingStrategy kind :
           {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kShardGradients,
            ShardingStrategy::kShardOptimizer, ShardingStrategy::kNoShard}) {
        const Values values = trained(mesh, strategy_for(kind, compressed(form)), kSteps);
        require(first.same_bits(values), name_of(kind) + " has other bits than FULL_SHARD");
        const double far = distance(values, exact);
        require(far > 0, name_of(kind) + " was not compressed");
        require(far < (form == WireForm::kInt8 ? 0.02 : 0.2), name_of(kind) + " is " + std::to_string(far) + " away");
      }
    });
  }
}

TEST(Compression, AllRanksGetTheSameSums) {
  on_hosts(3, 3, [&](const Mesh& mesh) {
    FirstValues first;
    for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer}) {
      Strategy strategy = strategy_for(kind, compressed(WireForm::kInt8, WireForm::kInt8));
      strategy.check.replica_hash_every = 1;
      require(first.same_bits(trained(mesh, strategy, kSteps)), name_of(kind));
    }
  });
}

// This model's messages are long enough to be packed. Gradients are sent in two steps, and parameters after one of
// these steps has updated them.
TEST(Compression, LosslessChangesNoBits) {
  constexpr TinyOptions kLarge{.vocab = 64, .width = 256, .hidden = 3000, .blocks = 2};
  // Each pair is a number of ranks, and the number of ranks on each host.
  constexpr std::pair<int, int> kHosts[] = {{2, 1}, {3, 1}, {4, 2}};
  constexpr DType kDTypes[] = {DType::kF32, DType::kBF16};
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp,
                                         ShardingStrategy::kShardGradients, ShardingStrategy::kNoShard};
  const auto cases = pairwise_of(kHosts, kDTypes, kKinds);
  for (const std::pair<int, int>& hosts : kHosts) {
    on_hosts(hosts.first, hosts.first / hosts.second, [&](const Mesh& mesh) {
      for (const auto& each : cases) {
        if (std::get<0>(each) != hosts) continue;
        const DType dtype = std::get<1>(each);
        const ShardingStrategy kind = std::get<2>(each);
        Strategy plain = strategy_for(kind, nullptr, dtype);
        plain.mixed_precision.reduce = dtype;
        Strategy lossless = plain;
        compressed(WireForm::kLossless, WireForm::kLossless)(lossless);
        if (kind != ShardingStrategy::kNoShard) lossless.compression.gathers = WireForm::kLossless;
        require(all_same_bits(trained(mesh, lossless, 2, kLarge), trained(mesh, plain, 2, kLarge)),
                name_of(kind) + " in " + std::string(tessera::name_of(dtype)) + " has other bits");
      }
    });
  }
}

/// Trains kSteps steps with the strategy's number of microbatches, and returns the values.
Values trained_on_microbatches(const Mesh& mesh, const Strategy& strategy) {
  Session session(mesh, strategy);
  for (std::size_t i = 0; i < kSteps; ++i) {
    for (std::int64_t k = 0; k < strategy.gradient_accumulation; ++k) {
      session.engine.backward(session.loss((i + static_cast<std::size_t>(k)) % session.batches.size()));
    }
    session.engine.step();
  }
  return session.values();
}

TEST(Compression, OtherGradientOptionsBesideItStayClose) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const Adjust int8 = compressed(WireForm::kInt8, WireForm::kPlain, /*feedback=*/true);
    const auto expect_near = [&](const std::string& what, ShardingStrategy kind, DType dtype, const Adjust& adjust) {
      const auto both = [&](Strategy& strategy) {
        adjust(strategy);
        int8(strategy);
      };
      const Values exact = trained_on_microbatches(mesh, strategy_for(kind, adjust, dtype)),
                   values = trained_on_microbatches(mesh, strategy_for(kind, both, dtype));
      const double far = distance(values, exact);
      require(far > 0 && far < 0.03, what + " is " + std::to_string(far) + " away");
    };
    for (const ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      expect_near("bf16", kind, DType::kBF16, [](Strategy& s) { s.mixed_precision.reduce = DType::kBF16; });
      expect_near("accumulation", kind, DType::kF32, [](Strategy& s) { s.gradient_accumulation = 2; });
      expect_near("late sync", kind, DType::kF32, [](Strategy& s) {
        s.gradient_accumulation = 2;
        s.gradient_sync = GradientSync::kLastMicrobatch;
      });
      expect_near("in backward", kind, DType::kF32, update_in_backward);
      expect_near("one after the other", kind, DType::kF32, [](Strategy& s) { s.reductions_ahead = 0; });
    }
  });
}

// There are two hosts with two ranks each. The replicate axis goes over the network, and the shard axis does not.
TEST(Compression, OnlyAxesOverTheNetworkAreCompressed) {
  on_hosts(4, 2, [&](const Mesh& mesh) {
    const auto trained_with = [&](CompressedAxes axes) {
      Strategy strategy = strategy_for(ShardingStrategy::kHybridShard, compressed(WireForm::kInt8));
      strategy.mesh = {2, 2};
      strategy.compression.axes = axes;
      return trained(mesh, strategy, kSteps);
    };
    Strategy plain = strategy_for(ShardingStrategy::kHybridShard);
    plain.mesh = {2, 2};
    const Values exact = trained(mesh, plain, kSteps), shard = trained_with(CompressedAxes::kShard),
                 replicate = trained_with(CompressedAxes::kReplicate), both = trained_with(CompressedAxes::kBoth);
    require(all_same_bits(shard, exact), "the shard axis is in shared memory");
    require(all_same_bits(replicate, both), "only the replicate axis is compressed");
    require(!all_same_bits(both, exact) && distance(both, exact) < 0.02, "the replicate axis is compressed");
  });
}

TEST(Compression, SharedMemoryIsNotCompressed) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    for (const ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      Session session(mesh, strategy_for(kind, compressed(WireForm::kInt8, WireForm::kPlain, true)));
      EXPECT_EQ(session.engine.allocated()[MemoryCategory::kFeedback], 0);
      for (std::size_t i = 0; i < kSteps; ++i) session.train(i);
      EXPECT_TRUE(all_same_bits(session.values(), trained(mesh, strategy_for(kind), kSteps)));
    }
  });
}

TEST(Compression, FeedbackIsPlannedAndRestoresRoundingErrors) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    constexpr std::size_t kMany = 24;
    const auto steady = [](const Adjust& adjust) {
      return [adjust](Strategy& strategy) {
        if (adjust) adjust(strategy);
        strategy.gradient_clipping = 0;
        strategy.optimizer.type = OptimizerType::kSgd;  // Adam would divide a small gradient by its own size
        strategy.optimizer.lr = 0.05;
        strategy.optimizer.weight_decay = 0;
      };
    };
    const auto run = [&](const Adjust& adjust) {
      return trained(mesh, strategy_for(ShardingStrategy::kFullShard, steady(adjust)), kMany);
    };
    const Values exact = run(nullptr), rounded = run(compressed(WireForm::kInt4)),
                 kept = run(compressed(WireForm::kInt4, WireForm::kPlain, true));
    const double without = distance(rounded, exact), with = distance(kept, exact);
    require(with < 0.5 * without,
            std::to_string(with) + " away with feedback, " + std::to_string(without) + " without");
    for (const ShardingStrategy kind : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
      Session session(mesh, strategy_for(kind, compressed(WireForm::kInt8, WireForm::kPlain, true)));
      Session plain(mesh, strategy_for(kind));
      const MemoryUse use = session.engine.allocated(), less = plain.engine.allocated();
      require(use[MemoryCategory::kFeedback] > 0 && less[MemoryCategory::kFeedback] == 0, "feedback is in the plan");
      require(use.total() - less.total() == use[MemoryCategory::kFeedback], "nothing else is");
    }
  });
}

TEST(Compression, SkippedStepResetsTheFeedback) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    Session session(mesh,
                    strategy_for(ShardingStrategy::kFullShard, compressed(WireForm::kInt8, WireForm::kPlain, true)));
    session.train(0);
    session.engine.backward(session.loss(1) * std::numeric_limits<float>::infinity());
    require(session.engine.step().overflow, "an infinite loss is skipped");
    for (std::size_t i = 1; i < kSteps; ++i) require(std::isfinite(session.train(i).loss), "training goes on");
    for (const auto& [name, value] : session.values()) require(value.isfinite().all().item<bool>(), name);
  });
}

}  // namespace compression_test
}  // namespace tessera::testing
