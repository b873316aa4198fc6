// Tests several Engines over one module: two Engines at the same time, and one Engine after the other.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <optional>
#include <sstream>

#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Parameters, SecondEngineIsRefusedWhileTheFirstLives) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    scene.refused([&] { scene.trainer(model); }, {{"another Engine", "hint"}});
    scene.refused([&] { scene.trainer(model->blocks.ptr()->children()[1], linear_units); }, {{"another Engine"}});
  });
}

struct SharerImpl : torch::nn::Module {
  explicit SharerImpl(const at::Tensor& table) {
    own = register_module("own", torch::nn::Linear(4, 4));
    shared = register_parameter("shared", table);
  }
  torch::nn::Linear own{nullptr};
  at::Tensor shared;
};

TEST(Parameters, EnginesOfTwoModulesThatShareAParameterAreRefused) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto sharer = seeded([&] { return std::make_shared<SharerImpl>(model->head); });
    const auto trainer = scene.trainer(model);
    scene.refused([&] { scene.trainer(sharer, linear_units); }, {{"shared", "another Engine"}});
  });
}

/// Returns an adjustment that sets this placement in a strategy.
Adjust placed_as(const Placed& placed) {
  return [=](Strategy& s) { place(s, placed); };
}

TEST(Parameters, SuccessiveEnginesKeepValues) {
  for (bool frozen : {false, true}) {
    expect_like_plain([&](Scene& scene) {
      Tiny model = tiny({.tied_head = frozen, .frozen_first_block = frozen});
      const auto trainer = scene.trainer(model);
      const auto values = [&] {
        Values result;
        trainer->read([&] { result = values_of(*model); });
        return result;
      };
      std::int64_t step = 0;
      train(scene, *trainer, model, step, step + 2), step += 2;
      for (const Placed& next : kOnePerPlacement) {
        const Values before = values();
        trainer->renew(placed_as(next));
        EXPECT_TRUE(all_same_bits(values(), before)) << "to " << name_of(next);
        train(scene, *trainer, model, step, step + 1), ++step;
      }
      scene.note(*trainer, *model);
    });
  }
}

// Masters in fp32 outlive Engines in 16 bits: the parameters of a later fp32 Engine have the values of the masters.
TEST(Parameters, SuccessiveEnginesKeepMasters) {
  for (MasterKind master : {MasterKind::kSplitBF16, MasterKind::kF32}) {
    on_matrix(
        [&](Scene& scene) {
          Tiny model = tiny({.frozen_first_block = true});
          const auto trainer = scene.trainer(model);
          const auto values_in = [&](DType dtype, const Placed& placed) {
            trainer->renew([&](Strategy& s) {
              placed_as(placed)(s);
              s.mixed_precision.param = dtype;
            });
            Values result;
            trainer->read([&] { result = values_of(*model); });
            return result;
          };
          train(scene, *trainer, model, 0, 3);
          Values rounded;
          trainer->read([&] { rounded = values_of(*model); });
          Values masters = values_in(DType::kF32, kOnePerPlacement[0]);
          EXPECT_FALSE(all_same_bits(masters, rounded));
          for (std::size_t i = 0; i < masters.size(); ++i) {
            const at::Tensor again = masters[i].second.to(at::kBFloat16).to(at::kFloat);
            // The high half of a split master is not always the nearest 16-bit number. It may be a neighbour of that
            // number.
            EXPECT_LE((again - rounded[i].second).abs().max().item<double>(),
                      rounded[i].second.abs().max().item<double>() * 0x1p-7)
                << masters[i].first;
          }
          // The value is halfway between two 16-bit numbers, and whole masters round it differently from split masters.
          trainer->write([&] { model->head.fill_(1.0 + 0x1p-8); });
          trainer->read([&] { masters = values_of(*model); });
          std::optional<Values> first;
          for (const Placed& placed : kOnePerPlacement) {
            const Values narrow = values_in(DType::kBF16, placed);
            if (!first) first = narrow;
            EXPECT_TRUE(all_same_bits(narrow, *first)) << name_of(placed);
            EXPECT_TRUE(all_same_bits(values_in(DType::kF32, placed), masters)) << name_of(placed);
          }
        },
        {.adjust = [&](Strategy& s) { s.mixed_precision.master = master; }, .dtype = DType::kBF16});
  }
}

// Parameters that were not sharded belong to the program again between two Engines.
TEST(Parameters, WritesBetweenTwoEnginesCount) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const double tolerance = dtype == DType::kF32 ? 1e-5 : 1e-2;
    expect_like_plain(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          for (std::int64_t round = 0; round < 2; ++round) {
            const Adjust adjust = [&](Strategy& s) {
              if (round == 0) place(s, Placed(ShardingStrategy::kNoShard, s.host_sharing));
            };
            const auto trainer = scene.trainer(model, adjust);
            const at::ScalarType type = model->first->weight.scalar_type();
            for (std::int64_t step = 0; step < 2; ++step) {
              const at::Tensor output = model->forward(scene.rows(noise(step + 2 * round, 5)).to(type));
              trainer->backward(output.to(at::kFloat).pow(2).mean());
              trainer->step();
            }
            scene.note(*trainer, *model);
          }
        },
        {linear_units, dtype, tolerance, tolerance});
    expect_like_plain(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          scene
              .trainer(model, [&](Strategy& s) { place(s, Placed(ShardingStrategy::kShardGradients, s.host_sharing)); })
              .reset();
          {
            const at::NoGradGuard no_grad;
            model->second->weight.mul_(0.5);
            model->third->bias.fill_(0.25);
          }
          const auto trainer = scene.trainer(model);
          scene.note(0);
          scene.note(*trainer, *model);
        },
        {linear_units, dtype, tolerance, tolerance});
  }
}

TEST(Parameters, ShardedModuleIsRefusedOnceItsEngineIsGone) {
  on_matrix(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        scene.trainer(model).reset();
        const ShardingStrategy kind = scene.strategy().strategy;
        const bool several = kind == ShardingStrategy::kFullShard || kind == ShardingStrategy::kShardGradOp;
        const bool sharded = scene.is_sharded() || (several && scene.mesh().world_size() > 1);
        const at::NoGradGuard no_grad;
        for (const auto& call : std::vector<Trainer::Action>{[&] { model->first->weight.mul_(0.5); },
                                                             [&] { (void)model->first->weight.sum(); },
                                                             [&] { (void)model->forward(noise(0, 5)); }}) {
          if (sharded) {
            scene.refused(call, {{"first", refusal_after(scene.strategy()), "hint"}, std::nullopt});
          } else {
            EXPECT_NO_THROW(call());
          }
        }
      },
      {.adjust = linear_units});
}

TEST(Parameters, LoadBetweenTwoEnginesCounts) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    std::stringstream file;
    torch::save(model, file);
    {
      const auto trainer = scene.trainer(model);
      train(scene, *trainer, model, 0, 2);
      if (!scene.is_plain()) trainer->write([&] { torch::load(model, file); });
    }
    if (scene.is_plain()) torch::load(model, file);
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

}  // namespace
}  // namespace tessera::testing
