// Tests the average of the weights. It is the average that a program would compute itself, under every strategy, in
// memory and on disk. Training continues as if the average had not been read.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "tessera/error.h"
#include "tests/support/offloaded.h"

namespace tessera::testing {
namespace ema_test {

using ::testing::HasSubstr;

constexpr double kDecay = 0.9;

void averaged(Strategy& s) { s.ema.decay = kDecay; }

Values copies_of(const torch::nn::Module& module) {
  Values values = values_of(module);
  for (auto& [name, value] : values) value = value.clone();
  return values;
}

Values averages_of(Session& session) {
  const Gathered guard(session.engine, Gathered::kEma);
  return copies_of(*session.model);
}

/// Makes a step. Every third step gives a gradient only to the head.
void train(Session& session, std::size_t i) {
  session.engine.backward(i % 3 == 2 ? session.model->head.square().mean() : session.loss(i));
  session.engine.step();
}

TEST(Ema, EqualsAnAverageMadeByHand) {
  for (const Below* below : kInMemoryAndBelow) {
    for (const int ranks : {1, 2, 3}) {
      on_each_placement(
          ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kAwkward);
            Values wanted = session.values();
            for (auto& [name, value] : wanted) value = value.clone();
            for (std::size_t i = 0; i < 7; ++i) {
              train(session, i);
              const Values weights = session.values();
              for (std::size_t k = 0; k < wanted.size(); ++k) {
                at::Tensor& average = wanted[k].second;
                average = i == 0 ? weights[k].second.clone() : average + (weights[k].second - average) * (1.0 - kDecay);
              }
              EXPECT_TRUE(all_same_bits(averages_of(session), wanted)) << "step " << i << ", " << ranks << " ranks";
            }
          },
          [&](Strategy& s) {
            adjusted_to(kKept[0], below)(s);
            averaged(s);
          });
    }
  }
}

TEST(Ema, HasTheSameBitsUnderEveryStrategyAndFormat) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && kept.param == DType::kF16) continue;
      FirstValues first;
      for (const Below* below : kInMemoryAndBelow) {
        on_each_placement(
            2,
            [&](const Mesh& mesh, const Strategy& strategy) {
              Session session(mesh, strategy, kAwkward);
              for (std::size_t i = 0; i < 5; ++i) train(session, i);
              EXPECT_TRUE(first.same_bits(mesh, averages_of(session))) << name_of(kept);
            },
            [&](Strategy& s) {
              adjusted_to(kept, below)(s);
              averaged(s);
              if (in_backward) update_in_backward(s);
            },
            kept.param);
      }
    }
  }
}

TEST(Ema, ShowingTheAverageChangesNothing) {
  for (const Kept& kept : kOneOfEachKind) {
    for (const bool in_backward : {false, true}) {
      if (in_backward && kept.param == DType::kF16) continue;
      FirstValues first;  // the values of a run without an average
      const auto train = [&](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy, kWide);
        for (std::size_t i = 0; i < 5; ++i) {
          session.train(i);
          if (strategy.ema.decay == 0) continue;
          const EmaWeights average(session.engine);
          session.engine.evaluate(std::vector<std::size_t>{i}, [&](std::size_t k) { return session.loss(k); });
        }
        EXPECT_TRUE(first.same_bits(mesh, session.values())) << name_of(kept);
      };
      const auto adjust = [&](Strategy& s) {
        adjusted_to(kept, nullptr)(s);
        s.check.values = true;
        if (in_backward) update_in_backward(s);
      };
      run_ranks({.ranks = 2},
                [&](const Mesh& mesh) { train(mesh, strategy_for(ShardingStrategy::kFullShard, adjust, kept.param)); });
      on_each_placement(
          2, train,
          [&](Strategy& s) {
            adjust(s);
            averaged(s);
          },
          kept.param);
    }
  }
}

TEST(Ema, EvaluationUsesTheAverage) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        for (std::size_t i = 0; i < 4; ++i) session.train(i);
        const Values averages = averages_of(session);
        Tiny plain = make_tiny({}, false);
        {
          const torch::NoGradGuard no_grad;
          for (const auto& [name, value] : averages) plain->named_parameters()[name].copy_(value);
        }
        const auto loss_of = [&](Tiny& model) {
          return model->forward(rows_of(session.batches[5].tokens, mesh), rows_of(session.batches[5].targets, mesh));
        };
        EmaWeights average(session.engine);
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(same_bits(loss_of(session.model), loss_of(plain)));
        average.close();
        EXPECT_FALSE(same_bits(loss_of(session.model), loss_of(plain)));
      },
      averaged);
}

TEST(Ema, EqualsTheWeightsBeforeAndAfterTheFirstStep) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        {
          const Gathered guard(session.engine, Gathered::kWrite);
          const torch::NoGradGuard no_grad;
          for (at::Tensor& parameter : session.model->parameters()) parameter.mul_(1.25);
        }
        const Values written = session.values();
        EXPECT_TRUE(all_same_bits(averages_of(session), written));
        session.train(0);
        EXPECT_FALSE(all_same_bits(session.values(), written));
        EXPECT_TRUE(all_same_bits(averages_of(session), session.values()));
      },
      averaged);
}

TEST(Ema, AverageIsCarriedWhenFreezingChanges) {
  for (const Below* below : kInMemoryAndBelow) {
    on_each_placement(
        2,
        [](const Mesh& mesh, const Strategy& strategy) {
          Session session(mesh, strategy, kWide);
          for (std::size_t i = 0; i < 2; ++i) session.train(i);
          Values wanted = averages_of(session);
          session.engine.set_trainable("blocks.0.*", false);
          for (std::size_t i = 2; i < 4; ++i) {
            session.train(i);
            const Values weights = session.values();
            for (std::size_t k = 0; k < wanted.size(); ++k) {
              wanted[k].second = wanted[k].second + (weights[k].second - wanted[k].second) * (1.0 - kDecay);
            }
          }
          const Values averages = averages_of(session), weights = session.values();
          for (std::size_t k = 0; k < wanted.size(); ++k) {
            const bool is_frozen = wanted[k].first.starts_with("blocks.0.");  // a frozen parameter has lost its average
            EXPECT_TRUE(same_bits(averages[k].second, is_frozen ? weights[k].second : wanted[k].second))
                << wanted[k].first;
          }
        },
        [&](Strategy& s) {
          adjusted_to(kKept[0], below)(s);
          averaged(s);
        });
  }
}

TEST(Ema, DiskTrafficEqualsThePlan) {
  for (const Kept& kept : kKept) {
    Strategy strategy = strategy_of(kept, ShardingStrategy::kFullShard, &kSomeBelow);
    averaged(strategy);
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy, kWide);
      expect_planned_disk_traffic(session, name_of(kept));
    });
  }
}

TEST(Ema, NeedsFourBytesAParameter) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    const auto optimizer_bytes = [&](const Adjust& adjust) {
      const Session session(mesh, strategy_for(ShardingStrategy::kFullShard, adjust), kWide);
      return session.engine.plan().use[MemoryCategory::kOptimizer];
    };
    // The average adds four bytes to the eight of AdamW's states.
    EXPECT_EQ(2 * optimizer_bytes(averaged), 3 * optimizer_bytes(nullptr));
  });
}

TEST(Ema, CallsOutOfTurnAreRefused) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        Engine& engine = session.engine;
        const auto look = [&] { const EmaWeights average(engine); };
        engine.backward(session.loss(0));
        EXPECT_THAT(usage_error_of(look), HasSubstr("between backward and step"));
        engine.step();
        {
          const Gathered guard(engine);
          EXPECT_THAT(usage_error_of(look), HasSubstr("under a Gathered guard"));
        }
        {
          const EmaWeights average(engine);
          EXPECT_THAT(usage_error_of(look), HasSubstr("already"));
          EXPECT_THAT(usage_error_of([&] { Gathered(engine, Gathered::kEma); }), HasSubstr("already"));
          EXPECT_THAT(usage_error_of([&] { Gathered(engine, Gathered::kWrite); }), HasSubstr("under EmaWeights"));
          EXPECT_THAT(usage_error_of([&] { engine.set_trainable("*", false); }), HasSubstr("under EmaWeights"));
          EXPECT_THAT(usage_error_of([&] { engine.backward(session.loss(1)); }),
                      HasSubstr("backward under EmaWeights"));
          const Gathered guard(engine);  // this guard reads the averages
        }
        session.train(1);
      },
      averaged);
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    EXPECT_THAT(usage_error_of([&] { const EmaWeights average(session.engine); }), HasSubstr("\"ema\": {\"decay\""));
  });
}

TEST(Ema, ExceptionThatLeavesItsScopeEndsTheGroup) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, averaged));
    session.train(0);
    EXPECT_THROW(
        {
          const EmaWeights average(session.engine);
          throw std::runtime_error("the program's own");
        },
        std::runtime_error);
    EXPECT_THAT(error_of([&] { session.train(1); }), HasSubstr("EmaWeights"));
  });
}

}  // namespace ema_test
}  // namespace tessera::testing
