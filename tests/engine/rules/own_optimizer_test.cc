// Tests a program's own update rules. Their state is sharded, offloaded, averaged and saved like that of Tessera's
// rules.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"
#include "tests/support/offloaded.h"
#include "tests/support/stand_ins/own_adamw.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace own_optimizer_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Elements = ElementwiseOptimizer::Elements;

constexpr std::size_t kSteps = 6;

/// A rule that only adds `e.lr` to each parameter, and returns the result in a new tensor.
struct Shift final : ElementwiseOptimizer {
  std::vector<std::string> states() const override { return {}; }
  void update(Elements& e) const override { e.parameters = e.parameters + e.lr; }
};

void with_own(Strategy& s) {
  s.optimizer = {.type = OptimizerType::kOwn, .lr = 1e-2, .weight_decay = 0.1};
  s.optimizer.groups = {{.match = {"*"}, .max_dim = 1, .lr_ratio = 2, .weight_decay = 0.0}};
  s.gradient_clipping = 0;
}

/// Sets the groups of with_own for Tessera's own AdamW.
void with_adamw(Strategy& s) {
  with_own(s);
  s.optimizer.type = OptimizerType::kAdamW;
  s.optimizer.eps = 1e-3;
}

Values trained(const Mesh& mesh, const Strategy& strategy, std::shared_ptr<const ElementwiseOptimizer> rule,
               std::size_t steps, TinyOptions options = kAwkward) {
  Session session(mesh, strategy, options, OwnRules::of(std::move(rule)));
  for (std::size_t i = 0; i < steps; ++i) session.train(i);
  return session.values();
}

TEST(OwnOptimizer, OwnAdamWEqualsAdamW) {
  for (const int ranks : {1, 2}) {
    const Values wanted = of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
      return trained(mesh, strategy_for(ShardingStrategy::kFullShard, with_adamw), kSteps, kAwkward);
    });
    on_each_placement(
        ranks,
        [&](const Mesh& mesh, const Strategy& strategy) {
          const Values values = trained(mesh, strategy, std::make_shared<OwnAdamW>(), kSteps);
          if (mesh.rank() == 0) expect_close(values, wanted, 1e-5, std::to_string(ranks) + " ranks");
        },
        with_own);
  }
}

TEST(OwnOptimizer, HasTheSameBitsUnderEveryStrategyInMemoryAndOnDisk) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int ranks : {2, 3}) {
      FirstValues first;
      for (const Below* below : kInMemoryAndBelow) {
        on_each_placement(
            ranks,
            [&](const Mesh& mesh, const Strategy& strategy) {
              EXPECT_TRUE(first.same_bits(mesh, trained(mesh, strategy, std::make_shared<OwnAdamW>(), kSteps)))
                  << name_of(dtype) << ", " << ranks << " ranks";
            },
            [&](Strategy& s) {
              with_own(s);
              s.ema.decay = 0.9;
              if (below) put_below(s, *below);
            },
            dtype);
      }
    }
  }
}

TEST(OwnOptimizer, UpdatesInBackwardHaveTheSameBits) {
  FirstValues first;
  for (const bool in_backward : {false, true}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kFullShard, with_own);
      strategy.optimizer.in_backward = in_backward;
      EXPECT_TRUE(first.same_bits(mesh, trained(mesh, strategy, std::make_shared<OwnAdamW>(), kSteps, kWide)))
          << in_backward;
    });
  }
}

TEST(OwnOptimizer, RuleMayReplaceTheParameterTensor) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, with_own), kWide,
                    OwnRules::of(std::make_shared<Shift>()));
    const Values before = session.values();
    session.train(0);
    const Values after = session.values();
    for (std::size_t i = 0; i < before.size(); ++i) {
      const double lr = before[i].second.dim() == 1 ? 2e-2 : 1e-2;
      EXPECT_TRUE(at::equal(after[i].second, before[i].second + lr)) << before[i].first;
    }
  });
}

TEST(OwnOptimizer, RuleGetsTheMeanGradientClippedByValue) {
  struct Sees final : ElementwiseOptimizer {
    mutable double largest = 0;
    std::vector<std::string> states() const override { return {}; }
    void update(Elements& e) const override { largest = std::max(largest, e.gradient.abs().max().item<double>()); }
  };
  const auto seen = [](std::int64_t microbatches, double clip_value) {
    const auto rule = std::make_shared<Sees>();
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kNoShard, with_own);
      strategy.gradient_accumulation = microbatches;
      strategy.gradient_clip_value = clip_value;
      Session session(mesh, strategy, kAwkward, OwnRules::of(rule));
      const Batch& batch = session.batches[0];
      for (std::int64_t i = 0; i < microbatches; ++i)
        session.engine.backward(session.model->forward(batch.tokens, batch.targets));
      session.engine.step();
    });
    return rule->largest;
  };
  EXPECT_NEAR(seen(2, 0), seen(1, 0), 1e-6);
  EXPECT_GT(seen(1, 0), 2e-3);
  EXPECT_FLOAT_EQ(seen(1, 1e-3), 1e-3);
}

TEST(OwnOptimizer, StatesAreLoadedOnOtherNumbersOfRanks) {
  const TestFolder folder;
  const std::string path = folder / "saved";
  std::optional<Values> wanted;
  const auto train = [&](int ranks, bool loads, std::size_t from, std::size_t to) {
    return of_rank_zero({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, with_own), kAwkward,
                      OwnRules::of(std::make_shared<OwnAdamW>()));
      if (loads) load_checkpoint(session.engine, path);
      for (std::size_t i = from; i < to; ++i) session.train(i);
      if (!loads) save_checkpoint(session.engine, path);
      return session.values();
    });
  };
  train(2, false, 0, 3);
  const Values on_two = train(2, true, 3, 6);
  EXPECT_TRUE(all_same_bits(on_two, [&] {
    return of_rank_zero({.ranks = 2}, [&](const Mesh& mesh) {
      const Strategy strategy = strategy_for(ShardingStrategy::kShardGradients, with_own);
      return trained(mesh, strategy, std::make_shared<OwnAdamW>(), 6);
    });
  }()));
  EXPECT_TRUE(all_same_bits(train(3, true, 0, 0), train(1, true, 0, 0)));
}

/// Returns the error of an Engine with `rule` and `adjust`, either when it is made or in a step.
std::string error_with(std::shared_ptr<const ElementwiseOptimizer> rule, const Adjust& adjust = with_own) {
  return error_of([&] {
    run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), kAwkward, OwnRules::of(rule));
      session.train(0);
    });
  });
}

TEST(OwnOptimizer, WrongStatesAndThrownErrorsAreNamed) {
  const auto names = [](std::vector<std::string> states) {
    struct Rule final : ElementwiseOptimizer {
      explicit Rule(std::vector<std::string> states) : names(std::move(states)) {}
      std::vector<std::string> states() const override { return names; }
      void update(Elements&) const override {}
      const std::vector<std::string> names;
    };
    return std::make_shared<Rule>(std::move(states));
  };
  EXPECT_THAT(error_with(names({"a", "a"})), HasSubstr("\"a\" is no name for a state"));
  EXPECT_THAT(error_with(names({"ema"})), HasSubstr("\"ema\" is no name for a state"));
  EXPECT_THAT(error_with(names({"a", "b", "c", "d"})), HasSubstr("at most 3 states, got 4"));
  EXPECT_THAT(error_with(nullptr), HasSubstr("optimizer.type is own"));
  EXPECT_THAT(error_with(std::make_shared<Shift>(), with_adamw), HasSubstr("optimizer.type is adamw"));
  EXPECT_THAT(error_with(std::make_shared<Shift>(),
                         [](Strategy& s) {
                           with_own(s);
                           s.optimizer.state_dtype = StateDType::kBF16;
                         }),
              HasSubstr("state_dtype"));

  struct OtherState final : ElementwiseOptimizer {
    std::vector<std::string> states() const override { return {"a"}; }
    void update(Elements& e) const override { e.states[0] = e.states[0] + 1; }
  };
  EXPECT_THAT(
      error_with(std::make_shared<OtherState>()),
      AllOf(HasSubstr("unit "), HasSubstr(": ElementwiseOptimizer::update: state \"a\" is another tensor now")));
  struct Sums final : ElementwiseOptimizer {
    std::vector<std::string> states() const override { return {}; }
    void update(Elements& e) const override { e.parameters = e.parameters.sum(); }
  };
  EXPECT_THAT(error_with(std::make_shared<Sums>()), HasSubstr("wanted parameters of ["));
  struct Throws final : ElementwiseOptimizer {
    std::vector<std::string> states() const override { return {}; }
    void update(Elements&) const override { throw std::runtime_error("a rule with a toothache"); }
  };
  EXPECT_THAT(error_with(std::make_shared<Throws>()), HasSubstr("a rule with a toothache"));
}

}  // namespace own_optimizer_test
}  // namespace tessera::testing
