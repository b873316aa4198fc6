// PowerSGD and top-k over a network, with everything that moves gradients: ranks are processes joined by Gloo.

#include "tests/engine/gradient_methods.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "runtime/comm/shared/run_ranks.h"

namespace tessera::testing {
namespace {

/// Both of them, under NO_SHARD.
const std::pair<const char*, Adjust> kMethods[] = {{"PowerSGD", power_sgd(2)}, {"top-k", top_k(0.05)}};

std::int64_t reduced_in_a_step(Session& session, std::size_t i) {
  const std::int64_t before = session.engine.traffic().reduced_bytes;
  session.train(i);
  return session.engine.traffic().reduced_bytes - before;
}

TEST(GradientMethods, SendWhatIsPredictedAndAreInThePlan) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const std::int64_t vocab = 19, width = 12, hidden = 31, blocks = 3;
    Session plain(mesh, strategy_for(ShardingStrategy::kNoShard, descend));
    const MemoryUse less = plain.engine.allocated();
    const auto expect = [&](const Adjust& adjust, std::int64_t wire_numel) {
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, adjust));
      for (std::size_t i = 0; i < 3; ++i) {
        const std::int64_t bytes = reduced_in_a_step(session, i);
        require(bytes == wire_numel * 4, std::to_string(bytes) + " bytes for " + std::to_string(wire_numel * 4));
      }
      const MemoryUse use = session.engine.allocated();
      require(use == session.engine.plan().use, "the plan is what is allocated");
      require(use[MemoryCategory::kFeedback] > 0, "it holds what is kept");
      require(use.total() - less.total() == use[MemoryCategory::kFeedback], "nothing else is in the plan");
    };
    const std::int64_t rank = 2, vectors = 3 * width + hidden;
    expect(power_sgd(rank), 2 * (vocab + width) * rank + blocks * (2 * (hidden + width) * rank + vectors));
    const auto count = [](std::int64_t numel) { return (numel + 19) / 20; };
    expect(top_k(0.05), 2 * (count(2 * vocab * width) + blocks * count(2 * hidden * width + vectors)));
  });
}

/// What kTimes steps leave, of as many microbatches as the strategy says.
Values trained_on_parts(const Mesh& mesh, const Strategy& strategy, TinyOptions options) {
  Session session(mesh, strategy, options);
  for (std::size_t i = 0; i < kTimes; ++i) {
    for (std::int64_t k = 0; k < strategy.gradient_accumulation; ++k)
      session.engine.backward(session.loss(i + static_cast<std::size_t>(k)));
    session.engine.step();
  }
  return session.values();
}

TEST(GradientMethods, WorkWithEverythingThatMovesGradients) {
  TinyOptions unused, recomputed;
  unused.frozen_first_block = unused.unused_block = true;
  recomputed.shared_block = recomputed.recompute = recomputed.tied_head = true;
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const auto expect_alike = [&](const std::string& what, TinyOptions options, const Adjust& adjust) {
      const auto run = [&](ShardingStrategy kind, const Adjust& method) {
        const auto both = [&](Strategy& strategy) {
          method(strategy);
          if (adjust) adjust(strategy);
        };
        return trained_on_parts(mesh, strategy_for(kind, both), options);
      };
      const Values exact = run(ShardingStrategy::kNoShard, descend);
      for (const auto& [name, method] : kMethods) {
        const Values values = run(ShardingStrategy::kNoShard, method);
        const double far = distance(values, exact);
        require(far > 0 && far < 0.1, c10::str(name, ", ", what, ": ", far, " away"));
        require(all_same_bits(run(ShardingStrategy::kShardGradients, method), values),
                c10::str(name, ", ", what, ": SHARD_GRADIENTS has other bits"));
      }
    };
    expect_alike("not all used", unused, nullptr);
    expect_alike("recomputed", recomputed, nullptr);
    expect_alike("accumulation", {}, [](Strategy& s) { s.gradient_accumulation = 2; });
    expect_alike("late sync", {}, [](Strategy& s) {
      s.gradient_accumulation = 2;
      s.gradient_sync = GradientSync::kLastMicrobatch;
    });
    expect_alike("in backward", {}, update_in_backward);
    expect_alike("one after the other", {}, [](Strategy& s) { s.reductions_ahead = 0; });
    expect_alike("three ahead", {}, [](Strategy& s) { s.reductions_ahead = 3; });
  });
}

TEST(GradientMethods, HaveNoEffectInSharedMemory) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    for (const auto& [name, method] : kMethods) {
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, method));
      EXPECT_EQ(session.engine.allocated()[MemoryCategory::kFeedback], 0) << name;
      for (std::size_t i = 0; i < kTimes; ++i) session.train(i);
      EXPECT_TRUE(
          all_same_bits(session.values(), trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), kTimes)))
          << name;
    }
  });
}

// The ranks that sum would be those of one host, and others would not know.
TEST(GradientMethods, AMeshOfSeveralReplicasIsRefusedHoweverItIsMade) {
  run_ranks({.ranks = 4}, [](const Mesh& mesh) {
    for (const auto& [name, method] : kMethods) {
      const Strategy strategy = strategy_for(ShardingStrategy::kNoShard, [&, &method = method](Strategy& s) {
        method(s);
        s.mesh.shard = 2;
      });
      EXPECT_THAT(error_of([&] { Session session(mesh, strategy); }), ::testing::HasSubstr("a mesh of one replica"));
    }
  });
}

TEST(GradientMethods, BeginAtTheirStartStep) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    const auto run = [&](std::int64_t start, std::size_t steps) {
      return trained(mesh, strategy_for(ShardingStrategy::kNoShard, power_sgd(2, start)), steps);
    };
    const auto exact = [&](std::size_t steps) {
      return trained(mesh, strategy_for(ShardingStrategy::kNoShard, descend), steps);
    };
    require(all_same_bits(run(3, 3), exact(3)), "three steps are plain");
    require(!all_same_bits(run(3, 4), exact(4)), "the fourth is not");
  });
}

/// What two steps after `happens` leave is what they leave in a new Engine over the same values.
void expect_to_begin_anew(const Mesh& mesh, const Adjust& method, const std::function<void(Session&)>& happens,
                          const std::string& what) {
  Session session(mesh, strategy_for(ShardingStrategy::kNoShard, method));
  for (std::size_t i = 0; i < 3; ++i) session.train(i);
  happens(session);
  const Values before = session.values();
  session.train(3);
  session.train(4);
  Session fresh(mesh, strategy_for(ShardingStrategy::kNoShard, method));
  {
    const Gathered gathered(fresh.engine, Gathered::kWrite);
    const at::NoGradGuard no_grad;
    const auto parameters = fresh.model->named_parameters();
    for (const auto& [name, value] : before) parameters[name].copy_(value);
  }
  fresh.train(3);
  fresh.train(4);
  require(all_same_bits(session.values(), fresh.values()), what + " does not begin anew");
}

TEST(GradientMethods, BeginAnewWhereWhatTheyKeptIsOfAnotherRun) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    for (const auto& [name, method] : kMethods) {
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.backward(session.loss(1) * std::numeric_limits<float>::infinity());
            require(session.engine.step().overflow, "an infinite loss is skipped");
          },
          std::string(name) + " after a skipped step");
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.backward(session.loss(1) * std::numeric_limits<float>::quiet_NaN());
            session.engine.zero_grad();
          },
          std::string(name) + " after gradients that were dropped");
      expect_to_begin_anew(
          mesh, method,
          [](Session& session) {
            session.engine.set_trainable("blocks.0.*", false);
            session.engine.set_trainable("blocks.0.*", true);
          },
          std::string(name) + " after set_trainable");
    }
  });
}

TEST(GradientMethods, LearnWhatRepeats) {
  on_hosts(2, 2, [&](const Mesh& mesh) {
    constexpr std::size_t kMany = 40;
    const auto loss_after = [&](const Adjust& adjust) {
      const auto faster = [&](Strategy& strategy) {
        adjust(strategy);
        strategy.optimizer.lr = 0.3;
        strategy.check.replica_hash_every = 0;
      };
      Session session(mesh, strategy_for(ShardingStrategy::kNoShard, faster));
      double loss = 0;
      for (std::size_t i = 0; i < kMany; ++i) loss = session.train(0).loss;
      return loss;
    };
    const double exact = loss_after(descend);
    for (const auto& [name, method] : kMethods) {
      const double loss = loss_after(method);
      require(loss < 1.05 * exact, c10::str(name, ": loss ", loss, ", uncompressed ", exact));
    }
  });
}

}  // namespace
}  // namespace tessera::testing
