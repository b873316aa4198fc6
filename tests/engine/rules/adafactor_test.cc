// Tests Adafactor in an Engine. It updates whole tensors, in whatever way they are cut over the ranks. Its results
// agree with PyTorch's, and all strategies give the same bits.

#include <ATen/ops/matmul.h>
#include <ATen/ops/norm.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_folder.h"
#include "checkpoint/saved_checkpoint.h"
#include "engine/step/rules/tensor_rule.h"
#include "tessera/checkpoint.h"
#include "tests/support/offloaded.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace adafactor_test {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

/// Sets Adafactor with three groups: vectors without decay at twice the rate, blocks with much decay, and all other
/// parameters.
void with_adafactor(Strategy& s) {
  s.optimizer = {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1};
  s.optimizer.groups = {{.match = {"*"}, .max_dim = 1, .lr_ratio = 2, .weight_decay = 0.0},
                        {.match = {"blocks.*.up.weight", "blocks.*.down.weight"}, .weight_decay = 0.3}};
  s.gradient_clipping = 0;
}

// ---- torch/optim/_adafactor.py, _single_tensor_adafactor, line by line ----------------------------------------------

struct PlainAdafactor {
  const AdafactorConfig config = {};
  struct States {
    at::Tensor row_var, col_var, variance;
  };
  std::map<std::string, States> states = {};
  double step = 0;

  void update(const std::string& name, at::Tensor parameter, const at::Tensor& gradient, double lr, double decay) {
    constexpr double kEps1 = 1.1920928955078125e-07;
    States& s = states[name];
    const bool is_factored = gradient.dim() > 1;
    if (!s.row_var.defined() && is_factored) {
      std::vector<std::int64_t> rows = gradient.sizes().vec(), columns = rows;
      rows[rows.size() - 1] = columns[columns.size() - 2] = 1;
      s.row_var = at::zeros(rows);
      s.col_var = at::zeros(columns);
    }
    if (!s.variance.defined() && !is_factored) s.variance = at::zeros_like(gradient);
    const double one_minus_beta2 = std::pow(step, config.beta2_decay), rho = std::min(lr, 1 / std::sqrt(step));
    const auto rms = [](const at::Tensor& t) {
      return t.norm(2).item<double>() / std::sqrt(static_cast<double>(t.numel()));
    };
    const double alpha = std::max(config.min_rms, rms(parameter)) * rho;
    if (decay != 0) parameter.mul_(1 - lr * decay);
    at::Tensor estimate;
    if (is_factored) {
      const auto mean = [&](std::int64_t dim) {
        return at::norm(gradient, 2, dim, /*keepdim=*/true).square_().div_(gradient.size(dim));
      };
      s.row_var.lerp_(mean(-1), one_minus_beta2);
      s.col_var.lerp_(mean(-2), one_minus_beta2);
      estimate = at::matmul(s.row_var, s.col_var);
      estimate.div_(s.row_var.mean(-2, /*keepdim=*/true).clamp_min_(kEps1));
    } else {
      s.variance.lerp_(gradient * gradient, one_minus_beta2);
      estimate = s.variance.clone();
    }
    at::Tensor update = estimate.clamp_min_(kEps1 * kEps1).rsqrt_().mul_(gradient);
    parameter.add_(update, -alpha / std::max(1.0, rms(update) / config.clip_threshold));
  }
};

Values train_plainly(const AdafactorConfig& config, double lr) {
  Tiny model = make_tiny({}, /*deferred=*/false);
  PlainAdafactor adafactor{config};
  const auto batches = make_batches(6, 24, 5, TinyOptions{}.vocab);
  for (std::size_t i = 0; i < 20; ++i) {
    model->zero_grad();
    model->forward(batches[i % 6].tokens, batches[i % 6].targets).backward();
    const at::NoGradGuard no_grad;
    ++adafactor.step;
    for (auto& item : model->named_parameters()) {
      const bool is_vector = item.value().dim() == 1;
      const double decay = is_vector ? 0.0 : item.key().starts_with("blocks.") ? 0.3 : 0.1;
      adafactor.update(item.key(), item.value(), item.value().grad(), is_vector ? 2 * lr : lr, decay);
    }
  }
  return values_of(*model);
}

TEST(Adafactor, EqualsPyTorch) {
  const AdafactorConfig configs[] = {{}, {.beta2_decay = -0.6, .min_rms = 0.2, .clip_threshold = 0.5}};
  for (const AdafactorConfig& config : configs) {
    const Values wanted = train_plainly(config, 1e-2);
    for (const int ranks : {1, 2, 3}) {
      on_placements(
          kInMemory, ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            const Values values = trained(mesh, strategy, 20);
            if (mesh.rank() == 0) expect_close(values, wanted, 1e-6, std::to_string(ranks) + " ranks");
          },
          [&](Strategy& s) {
            with_adafactor(s);
            s.optimizer.lr = 1e-2;
            s.optimizer.adafactor = config;
          });
    }
  }
}

TEST(Adafactor, HasTheSameBitsUnderEveryStrategyAndTheMemoryOfThePlan) {
  const Kept kinds[] = {{DType::kF32, MasterKind::kF32, StateDType::kF32},
                        {DType::kBF16, MasterKind::kSplitBF16, StateDType::kF32},
                        {DType::kBF16, MasterKind::kF32, StateDType::kF32},
                        {DType::kF16, MasterKind::kF32, StateDType::kF32}};
  for (const Kept& kept : kinds) {
    for (const int ranks : {2, 3}) {
      FirstValues first;
      on_placements(
          kInMemory, ranks,
          [&](const Mesh& mesh, const Strategy& strategy) {
            Session session(mesh, strategy, kAwkward);
            for (std::size_t i = 0; i < 4; ++i) {
              const StepResult step = session.train(i);
              EXPECT_EQ(step.planned, step.allocated) << name_of(kept);
            }
            EXPECT_TRUE(first.same_bits(mesh, session.values())) << name_of(kept) << ", " << ranks << " ranks";
          },
          [&](Strategy& s) {
            adjusted_to(kept, nullptr)(s);
            with_adafactor(s);
            s.ema.decay = 0.9;
            s.check.replica_hash_every = 1;
          },
          kept.param);
    }
  }
}

TEST(Adafactor, HasTheSameBitsOnAMeshOfTwoAxes) {
  FirstValues first;
  for (const bool over_world : {false, true}) {
    for (const bool shared : {false, true}) {
      run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
        Strategy strategy = strategy_for(Placed(ShardingStrategy::kHybridShard, shared), with_adafactor);
        strategy.mesh = {2, 2};
        strategy.optimizer.shard_over_world = over_world;
        EXPECT_TRUE(first.same_bits(mesh, trained(mesh, strategy, 4, kAwkward)))
            << "over world " << over_world << ", shared " << shared;
      });
    }
  }
}

TEST(Adafactor, FreezingForAWhileKeepsTheBits) {
  FirstValues first;
  on_placements(
      kInMemory, 2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        EXPECT_TRUE(first.same_bits(mesh, trained_with_weights_frozen_for_a_while(mesh, strategy)));
      },
      with_adafactor);
}

TEST(Adafactor, StridedMatricesGiveTheSameUpdate) {
  const AdafactorRule rule({}, c10::kCPU, nullptr);
  at::manual_seed(3);
  const at::Tensor value = at::randn({5, 3, 4}), gradient = at::randn({5, 3, 4});
  const auto updated = [&](at::IntArrayRef strides) {
    at::Tensor masters = at::empty_strided({5, 3, 4}, strides), g = masters.clone();
    masters.copy_(value);
    g.copy_(gradient);
    std::vector<float> rows(15), columns(20);
    const FlatParameter parameter{{}, "weight", {}, {5, 3, 4}, strides.vec(), 60};
    EXPECT_THAT(rule.states_of(parameter)[1].sizes, ElementsAre(5, 1, 4));
    rule.update(
        {parameter, {masters.data_ptr<float>(), 60}, {g.data_ptr<float>(), 60}, {}, {{rows, columns}}, 0.1, 0.1});
    return masters;
  };
  at::Tensor wanted = value.clone();
  PlainAdafactor plain{.step = 1};
  plain.update("weight", wanted, gradient, 0.1, 0.1);
  const at::Tensor got = updated({12, 4, 1});
  EXPECT_LE((got - wanted).abs().max().item<float>(), 1e-6f);
  EXPECT_TRUE(at::equal(updated({1, 20, 5}), got));
}

// ---- Checkpoints ----------------------------------------------------------------------------------------------------

TEST(AdafactorCheckpoint, ResumedRunHasTheSameBits) {
  const TestFolder folder;
  const Values whole = train_and_save(2, ShardingStrategy::kFullShard, folder / "whole", 6, with_adafactor);
  const std::string parts = folder / "parts";
  const auto with_async = [](Strategy& s) {
    with_adafactor(s);
    s.checkpoint.async = true;
  };
  train_and_save(2, ShardingStrategy::kNoShard, parts, 3, with_async);
  const Placed shared(ShardingStrategy::kFullShard, true);
  EXPECT_TRUE(all_same_bits(train_and_save(2, shared, parts, 3, with_adafactor), whole));
}

TEST(AdafactorCheckpoint, FactoredStatesAreLoadedOnOtherNumbersOfRanks) {
  const TestFolder folder;
  const std::string path = folder / "saved";
  const Values saved = train_and_save(2, ShardingStrategy::kFullShard, path, 3, with_adafactor);
  for (const int ranks : {3, 1, 4, 2}) {  // each run loads the checkpoint of the run before
    const Values loaded = train_and_save(ranks, ShardingStrategy::kFullShard, path, 0, with_adafactor);
    EXPECT_TRUE(all_same_bits(loaded, saved)) << ranks;
  }
  const auto opened = SavedCheckpoint::open(path + "/" + *latest_checkpoint(path, "test"), "test");
  ASSERT_TRUE(opened.ok()) << opened.status();
  for (const SavedParameter& parameter : (*opened)->manifest().parameters) {
    if (!parameter.trains) continue;
    ASSERT_TRUE(parameter.states) << parameter.name;
    if (parameter.shape.size() == 1) {
      EXPECT_THAT(*parameter.states, ElementsAre("variance"));
      EXPECT_EQ(parameter.shape_of("variance"), parameter.shape);
      continue;
    }
    EXPECT_THAT(*parameter.states, ElementsAre("row_var", "col_var"));
    EXPECT_THAT(parameter.shape_of("row_var"), ElementsAre(parameter.shape[0], 1));
    EXPECT_THAT(parameter.shape_of("col_var"), ElementsAre(1, parameter.shape[1]));
  }
}

// A parameter that was frozen has no states in the checkpoint, so its states begin with zeros.
TEST(AdafactorCheckpoint, ParameterFrozenAtTheSaveTrainsAfterALoad) {
  const TestFolder folder;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    const Strategy strategy = strategy_for(ShardingStrategy::kFullShard, with_adafactor);
    for (const bool frozen : {true, false}) {
      Tiny model = make_tiny({}, true);
      for (const auto& parameter : model->named_parameters()) {
        if (parameter.value().dim() == 1) parameter.value().requires_grad_(!frozen);
      }
      Engine engine(model, strategy, mesh);
      if (!frozen) {
        const LoadedCheckpoint loaded = load_checkpoint(engine, folder.path());
        ASSERT_EQ(loaded.inexact.size(), 1u);
        EXPECT_THAT(loaded.inexact[0], HasSubstr("begin with states of zeros, since they were frozen"));
      }
      const Batch batch = make_batches(1, 24, 5, 19)[0];
      engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
      engine.step();
      save_checkpoint(engine, folder.path());
    }
  });
}

TEST(AdafactorCheckpoint, CheckpointOfAnotherOptimizerGivesOneHint) {
  const TestFolder folder;
  const std::string adamw = folder / "adamw";
  train_and_save(1, ShardingStrategy::kFullShard, adamw, 1,
                 [](Strategy& s) { s.optimizer.type = OptimizerType::kAdamW; });
  const std::string text = error_of([&] { train_and_save(1, ShardingStrategy::kFullShard, adamw, 1, with_adafactor); });
  EXPECT_THAT(text, HasSubstr("\"row_var\", \"col_var\", \"variance\" for each parameter, and the checkpoint has"));
  const std::string remedy = "hint: give /optimizer/type as in the run that saved it";
  EXPECT_THAT(text, HasSubstr(remedy));
  EXPECT_EQ(text.find(remedy), text.rfind(remedy)) << text;
}

// ---- What Adafactor cannot do ---------------------------------------------------------------------------------------

TEST(Adafactor, UnsupportedKeysAreRefused) {
  const auto error_with = [](const Adjust& adjust) {
    return error_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kFullShard, [&](Strategy& s) {
                          with_adafactor(s);
                          adjust(s);
                        }));
      });
    });
  };
  EXPECT_THAT(error_with([](Strategy& s) { s.optimizer.state_dtype = StateDType::k8Bit; }),
              HasSubstr("adafactor needs \"state_dtype\": \"fp32\", got 8bit"));
}

}  // namespace adafactor_test
}  // namespace tessera::testing
