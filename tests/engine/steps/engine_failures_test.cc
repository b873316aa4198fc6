// Tests calls in a wrong order, exceptions, values that are not finite, and plans that do not fit.

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <limits>

#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/limits/patience.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace engine_failures_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

TEST(EngineFailures, CallsInTheWrongOrderAreRefusedAndHarmless) {
  on_each_placement(2, [](const Mesh& mesh, Strategy strategy) {
    strategy.gradient_accumulation = 2;
    Session session(mesh, strategy), obedient(mesh, strategy);
    const auto message_of_throw = [](const auto& call) -> std::string {
      try {
        call();
      } catch (const c10::Error& error) {
        return error.what();
      }
      return "nothing was thrown";
    };
    EXPECT_THAT(message_of_throw([&] { session.engine.step(); }), HasSubstr("gradient_accumulation"));
    session.engine.backward(session.loss(0));
    EXPECT_FALSE(session.engine.step_is_due());
    EXPECT_THAT(message_of_throw([&] { session.engine.step(); }), HasSubstr("called 1 times"));
    session.engine.backward(session.loss(1));
    EXPECT_TRUE(session.engine.step_is_due());
    EXPECT_THAT(message_of_throw([&] { session.engine.backward(session.loss(2)); }), HasSubstr("step()"));
    session.engine.step();
    for (std::size_t i : {0, 1}) obedient.engine.backward(obedient.loss(i));
    obedient.engine.step();
    EXPECT_TRUE(all_same_bits(session.values(), obedient.values()));
  });
}

TEST(EngineFailures, NaNOnOneRankSkipsTheStepOnAll) {
  on_each_placement(3, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy), spared(mesh, strategy);
    session.train(0), spared.train(0);
    const Values before = session.values();
    at::Tensor loss = session.loss(1);
    if (mesh.rank() == 1) loss = loss * std::numeric_limits<double>::quiet_NaN();
    session.engine.backward(loss);
    const StepResult result = session.engine.step();
    EXPECT_TRUE(result.overflow);
    EXPECT_TRUE(std::isnan(result.loss));
    EXPECT_EQ(result.step, 2);
    EXPECT_EQ(session.engine.steps_applied(), 1);
    EXPECT_TRUE(all_same_bits(session.values(), before));
    // The failed step left no trace: moments, bias corrections and gradients are as if it had not been made.
    EXPECT_FALSE(session.train(2).overflow);
    spared.train(2);
    EXPECT_TRUE(all_same_bits(session.values(), spared.values()));
  });
}

/// Runs ranks, with a failure of rank 1 in `fail`, and returns the text of each rank's exception.
std::vector<std::string> failures(const Placed& kind, const std::function<at::Tensor(Session&)>& fail) {
  constexpr int kCount = 3;
  std::vector<std::string> said(kCount);
  Deadline soon(std::chrono::seconds(10));
  const auto train = [&](const Mesh& mesh) {
    try {
      Session session(mesh, strategy_for(kind));
      session.train(0);
      for (std::size_t i = 1; i < 50; ++i) {
        session.engine.backward(mesh.rank() == 1 && i == 2 ? fail(session) : session.loss(i));
        session.engine.step();
      }
    } catch (const std::exception& error) {
      said[mesh.rank()] = error.what();
      throw;
    }
  };
  EXPECT_THROW(run_ranks({.ranks = kCount}, train), std::exception);
  EXPECT_FALSE(soon.passed());
  return said;
}

TEST(EngineFailures, DifferentStrategiesOnRanksNameAllDifferingKeys) {
  std::vector<std::string> said(3);
  const auto make = [&](const Mesh& mesh) {
    Strategy strategy;
    strategy.durable.dir = "folder-of-rank-" + std::to_string(mesh.rank());  // folders may differ between ranks
    if (mesh.rank() == 2) {
      strategy.optimizer.weight_decay = 0.5;
      strategy.prefetch = 3;
    }
    try {
      Tiny model = make_tiny({}, true);
      const Engine engine(model, strategy, mesh);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      said[mesh.rank()] = error.message();
      throw;
    }
  };
  EXPECT_THROW(run_ranks({.ranks = 3}, make), Error);
  for (const std::string& message : said) {
    EXPECT_THAT(message, AllOf(HasSubstr("rank 2: /strategy/optimizer/weight_decay: 0.5, rank 0 has 0.01; "
                                         "/strategy/prefetch: 3, rank 0 has 1"),
                               Not(HasSubstr("folder-of")), Not(HasSubstr("rank 1:")), HasSubstr("hint:")));
  }
}

TEST(EngineFailures, ExceptionInForwardEndsAllRanks) {
  for (const Placed& kind : kOnePerPlacement) {
    const auto said =
        failures(kind, [](Session&) -> at::Tensor { throw std::runtime_error("the user's dog ate a batch"); });
    EXPECT_THAT(said[1], HasSubstr("dog"));
    for (int other : {0, 2}) EXPECT_THAT(said[other], AllOf(HasSubstr("rank 1"), HasSubstr("dog"))) << name_of(kind);
  }
}

TEST(EngineFailures, ExceptionInBackwardReachesAllRanksWithItsMessage) {
  for (const Placed& kind : kOnePerPlacement) {
    const auto said = failures(kind, [](Session& session) {
      const Batch& batch = session.batches[0];
      at::Tensor x = session.model->embedding(batch.tokens);
      x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook with a toothache"); });
      for (const auto& block : *session.model->blocks) x = std::dynamic_pointer_cast<BlockImpl>(block)->forward(x);
      return at::cross_entropy_loss(at::linear(x, session.model->head).flatten(0, 1), batch.targets.flatten());
    });
    for (const std::string& message : said) EXPECT_THAT(message, HasSubstr("toothache")) << name_of(kind);
  }
}

TEST(EngineFailures, ParametersOutliveTheEngineOrSayWhyNot) {
  const auto body = [](const Mesh& mesh, const Strategy& strategy) {
    Tiny model = make_tiny({}, true);
    Values at_the_end;
    {
      Engine engine(model, strategy, mesh);
      const Batch batch = make_batches(1, 24, 5, 19)[0];
      engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
      engine.step();
      const Gathered gathered(engine);
      at_the_end = values_of(*model);
    }
    const bool sharded =
        strategy.strategy == ShardingStrategy::kShardGradOp || strategy.strategy == ShardingStrategy::kFullShard;
    if (!sharded) {
      EXPECT_TRUE(all_same_bits(values_of(*model), at_the_end));
      // Only this rank owns the parameters now, in whatever way they were shared before.
      const at::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.fill_(mesh.rank());
      throw_if_error(value_or_throw(groups_of(mesh).axes(1, 2)).world->barrier("filled").wait());
      for (const auto& [name, value] : values_of(*model)) EXPECT_TRUE(value.eq(mesh.rank()).all().item<bool>()) << name;
      return;
    }
    try {
      values_of(*model);
      ADD_FAILURE() << "read without memory";
    } catch (const c10::Error& error) {
      EXPECT_THAT(std::string(error.what()), HasSubstr(refusal_after(strategy)));
    }
  };
  on_each_placement(2, body);
  const Strategy shared = strategy_for(Placed(ShardingStrategy::kShardGradients, /*shared=*/true));
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) { body(mesh, shared); });
}

TEST(EngineFailures, PlanOverTheLimitIsRefusedWithAStrategyThatFits) {
  Topology topology;
  topology.world_size = topology.local_world_size = 4;
  const TinyOptions options = {.blocks = 12};  // more units than buckets, so SHARD_GRADIENTS needs less memory
  const auto bytes = [&](ShardingStrategy kind) {
    return plan_memory(*make_tiny(options, true), strategy_for(kind), topology).use.total();
  };
  const std::int64_t limit = bytes(ShardingStrategy::kShardGradients);
  ASSERT_LT(limit, bytes(ShardingStrategy::kShardOptimizer));
  const auto start = [&](ShardingStrategy kind, std::int64_t limit_bytes) {
    run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(kind);
      strategy.memory.limit_bytes = limit_bytes;
      Session session(mesh, strategy, options);
      EXPECT_LE(session.train(0).allocated.total(), limit_bytes);
    });
  };
  const auto refusal = [&](ShardingStrategy kind, std::int64_t limit_bytes) -> std::string {
    try {
      start(kind, limit_bytes);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
      return error.message();
    }
    return "nothing was refused";
  };
  EXPECT_THAT(refusal(ShardingStrategy::kNoShard, limit),
              AllOf(HasSubstr("/memory/limit"), HasSubstr("optimizer "), HasSubstr("fits is SHARD_GRADIENTS")));
  EXPECT_NO_THROW(start(ShardingStrategy::kShardGradients, limit));
  EXPECT_THAT(refusal(ShardingStrategy::kFullShard, 100), HasSubstr("no strategy fits"));
}

}  // namespace engine_failures_test
}  // namespace tessera::testing
