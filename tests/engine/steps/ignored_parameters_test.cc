// Tests units.ignored: the program itself trains these parameters, and an Engine trains all other parameters.

#include <ATen/core/grad_mode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <span>
#include <tuple>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/collectives.h"
#include "tests/support/session.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace ignored_parameters_test {

using ::testing::HasSubstr;

const std::vector<std::string> kIgnored = {"blocks.1.*", "head"};

bool is_ignored(const std::string& name) { return name == "head" || name.starts_with("blocks.1."); }

void ignore_some(Strategy& strategy) {
  strategy.gradient_clipping = 0;
  strategy.units.ignored = kIgnored;
}

/// Trains the parameters that an Engine leaves to the program, as a program would.
class OwnTraining {
 public:
  explicit OwnTraining(Session& session)
      : session_(session),
        strategy_(session.engine.strategy().optimizer),
        optimizer_(ignored_of(*session.model), options()) {}

  void train(std::size_t i) {
    session_.engine.backward(session_.loss(i));
    for (const at::Tensor& parameter : ignored_of(*session_.model)) {
      all_reduce(session_.mesh, parameter.grad());
      parameter.mutable_grad().div_(session_.mesh.world_size());
    }
    optimizer_.step();
    optimizer_.zero_grad();
    session_.engine.step();
  }

  static std::vector<at::Tensor> ignored_of(const torch::nn::Module& module) {
    std::vector<at::Tensor> ignored;
    for (const auto& item : module.named_parameters())
      if (is_ignored(item.key())) ignored.push_back(item.value());
    return ignored;
  }

 private:
  torch::optim::AdamWOptions options() const {
    return torch::optim::AdamWOptions(strategy_.lr)
        .betas(std::make_tuple(strategy_.beta1, strategy_.beta2))
        .eps(strategy_.eps)
        .weight_decay(strategy_.weight_decay);
  }

  Session& session_;
  const OptimizerConfig strategy_;
  torch::optim::AdamW optimizer_;
};

TEST(IgnoredParameters, TrainedByTheProgramTheyEqualTheEnginesTraining) {
  for (const int ranks : {1, 2, 3}) {
    FirstValues first;
    for (const Placed& placed : ranks == 2 ? std::span<const Placed>(kOnePerPlacement) : kInMemory.last(2)) {
      const std::string what = name_of(placed) + " on " + std::to_string(ranks) + " ranks";
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        const Values wanted =
            trained(mesh, strategy_for(placed, [](Strategy& strategy) { strategy.gradient_clipping = 0; }), 5);
        Session session(mesh, strategy_for(placed, &ignore_some));
        OwnTraining own(session);
        for (std::size_t i = 0; i < 5; ++i) own.train(i);
        const Values got = session.values();
        expect_close(got, wanted, 2e-6, what);
        if (mesh.is_main()) {
          EXPECT_TRUE(first.same_bits(got)) << what;
        }
      });
    }
  }
}

TEST(IgnoredParameters, StepLeavesThemAndTheirGradientsAlone) {
  on_each_placement(
      2,
      [](const Mesh& mesh, const Strategy& strategy) {
        Session session(mesh, strategy);
        const auto ignored = OwnTraining::ignored_of(*session.model);
        std::vector<at::Tensor> before;
        for (const at::Tensor& parameter : ignored) before.push_back(parameter.detach().clone());
        session.engine.backward(session.loss(0));
        std::vector<at::Tensor> gradients;
        for (const at::Tensor& parameter : ignored) gradients.push_back(parameter.grad().clone());
        session.engine.step();
        for (std::size_t i = 0; i < ignored.size(); ++i) {
          EXPECT_TRUE(same_bits(ignored[i].detach(), before[i]));
          EXPECT_TRUE(same_bits(ignored[i].grad(), gradients[i]));
        }
      },
      &ignore_some);
}

TEST(IgnoredParameters, StartWithRankZerosValues) {
  on_each_placement(
      3,
      [](const Mesh& mesh, const Strategy& strategy) {
        Tiny model = make_tiny({}, false);
        if (mesh.rank() != 0) {
          const at::NoGradGuard no_grad;
          for (const at::Tensor& parameter : OwnTraining::ignored_of(*model)) parameter.fill_(mesh.rank());
        }
        const Tiny wanted = make_tiny({}, false);
        const Engine engine(model, strategy, mesh);
        const auto got = OwnTraining::ignored_of(*model), as = OwnTraining::ignored_of(*wanted);
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(same_bits(got[i].detach(), as[i].detach()));
      },
      &ignore_some);
}

TEST(IgnoredParameters, CheckpointsHoldThem) {
  const TestFolder folder;
  Values saved;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, &ignore_some));
    OwnTraining own(session);
    own.train(0);
    save_checkpoint(session.engine, folder.path());
    const Values values = session.values();
    if (mesh.is_main()) saved = values;
  });
  for (const int ranks : {1, 2, 3}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kShardGradients, &ignore_some));
      load_checkpoint(session.engine, folder.path());
      EXPECT_TRUE(all_same_bits(session.values(), saved)) << ranks;
      Session all(mesh, strategy_for(ShardingStrategy::kFullShard));
      EXPECT_THAT(error_of([&] { load_checkpoint(all.engine, folder.path()); }), HasSubstr("head"));
    });
  }
}

TEST(IgnoredParameters, CheckpointThatTrainedThemNamesTheKey) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session all(mesh, strategy_for(ShardingStrategy::kFullShard));
    save_checkpoint(all.engine, folder.path());
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, &ignore_some));
    EXPECT_THAT(error_of([&] { load_checkpoint(session.engine, folder.path()); }),
                HasSubstr("\"head\" of the checkpoint is not in the model: /units/ignored leaves it out"));
  });
}

TEST(IgnoredParameters, TiedOneIsIgnoredUnderBothNames) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.units.ignored = {"head"};
    Session session(mesh, strategy, {.tied_head = true});
    const at::Tensor before = session.model->embedding->weight.detach().clone();
    session.train(0);
    EXPECT_TRUE(same_bits(session.model->embedding->weight.detach(), before));
    EXPECT_TRUE(session.model->embedding->weight.grad().defined());
  });
}

TEST(IgnoredParameters, UnmatchedPatternsAreRefused) {
  run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.units.ignored = {"heads"};
    EXPECT_THAT(error_of([&] { Session(mesh, strategy); }), HasSubstr("/units/ignored: \"heads\" fits no parameter"));
  });
}

}  // namespace ignored_parameters_test
}  // namespace tessera::testing
