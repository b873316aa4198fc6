// What programs do to parameters between steps: load, save, convert, write, freeze, hand them to another Engine.

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/init.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/utils/convert_parameters.h>
#include <torch/serialize.h>

#include <sstream>

#include "tests/programs/harness.h"

namespace tessera::testing {
namespace {

constexpr double kShort = 10;  // seconds

void train(Scene& scene, Trainer& trainer, Tiny& model, std::int64_t begin, std::int64_t end) {
  for (std::int64_t step = begin; step < end; ++step) {
    trainer.backward(loss_of(scene, model, step));
    trainer.step();
  }
}

/// Trains, changes something by `change`, and expects that the next backward says so.
void expect_noticed(const std::function<void(Scene&, Tiny&)>& change, const Refusal& wanted,
                    const TinyOptions& options = {}) {
  on_matrix(
      [&](Scene& scene) {
        Tiny model = tiny(options);
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused(
            [&] {
              change(scene, model);
              trainer->backward(loss_of(scene, model, 1));
            },
            wanted);
      },
      {.timeout_s = kShort});
}

// ---- saving and loading ------------------------------------------------------------------------------------------

TEST(Parameters, SavedAndLoadedUnderGathered) {
  for (bool tied : {false, true}) {
    expect_like_plain([&](Scene& scene) {
      Tiny model = tiny({.tied_head = tied, .frozen_first_block = tied});
      const auto trainer = scene.trainer(model);
      train(scene, *trainer, model, 0, 2);
      std::stringstream file;
      trainer->read([&] { torch::save(model, file); });
      train(scene, *trainer, model, 2, 4);
      trainer->write([&] { torch::load(model, file); });
      scene.note(*trainer, *model);
      train(scene, *trainer, model, 4, 6);
      scene.note(*trainer, *model);
    });
  }
}

TEST(Parameters, LoadedBetweenBackwardAndStep) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::stringstream file;
    trainer->read([&] { torch::save(model, file); });
    train(scene, *trainer, model, 0, 2);
    trainer->backward(loss_of(scene, model, 2));
    trainer->write([&] { torch::load(model, file); });
    trainer->step();
    train(scene, *trainer, model, 3, 5);
    scene.note(*trainer, *model);
  });
}

// A file of fp32 for a module in 16 bits: the masters get all of it.
// torch::load gives a parameter the file's bytes whatever its dtype: plain LibTorch trains noise without a word.
TEST(Parameters, FileOfAWiderDtypeIsRefused) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        std::stringstream file;
        torch::save(tiny(), file);
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused([&] { trainer->write([&] { torch::load(model, file); }); },
                      {{"BFloat16", "wider dtype", "hint"}});
      },
      {.dtype = DType::kBF16, .timeout_s = kShort});
}

TEST(Parameters, LoadOutsideGatheredIsNoticed) {
  const auto load = [](Scene&, Tiny& model) {
    std::stringstream file;
    torch::save(tiny(), file);
    torch::load(model, file);
  };
  expect_noticed(load, {{"parameter ", "was given other memory", "Gathered"}});
}

TEST(Parameters, LoadUnderAGuardOfSomeUnitsIsNoticed) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        std::stringstream file;
        torch::save(tiny(), file);
        scene.refused(
            [&] {
              Gathered guard(*trainer->engine(), {model->blocks->ptr<BlockImpl>(1)->up->weight}, Gathered::kWrite);
              torch::load(model, file);
              guard.close();
              trainer->backward(loss_of(scene, model, 1));
            },
            {{"was given other memory", "Gathered"}});
      },
      {.timeout_s = kShort});
}

TEST(Parameters, LoadUnderAReadingGuardIsNoticed) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        std::stringstream file;
        torch::save(tiny(), file);
        scene.refused(
            [&] {
              Gathered guard(*trainer->engine());
              torch::load(model, file);
              guard.close();
            },
            {{"was given other memory", "kWrite"}});
      },
      {.timeout_s = kShort});
}

TEST(Parameters, LoadOfAnotherModelUnderGatheredIsRefused) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        std::stringstream file;
        torch::save(tiny({.hidden = 30}), file);
        scene.refused([&] { trainer->write([&] { torch::load(model, file); }); },
                      {{"blocks.0.up.weight", "[31, 12]", "[30, 12]"}});
      },
      {.timeout_s = kShort});
}

// ---- other memory ------------------------------------------------------------------------------------------------

TEST(Parameters, ConversionIsNoticed) {
  expect_noticed([](Scene&, Tiny& model) { model->to(at::kDouble); }, {{"was given other memory", "Module::to"}});
}

TEST(Parameters, OtherDataIsNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "was given other memory", "Gathered"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  expect_noticed([&](Scene&, Tiny& model) { weight_of(model).set_data(at::ones({31, 12})); }, wanted);
  expect_noticed(
      [&](Scene&, Tiny& model) {
        const at::NoGradGuard no_grad;
        weight_of(model).set_(at::ones({31, 12}));
      },
      wanted);
}

TEST(Parameters, OtherDataUnderAGuardIsTakenIn) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 2);
    trainer->write([&] {
      model->blocks->ptr<BlockImpl>(0)->up->weight.set_data(at::full({31, 12}, 0.03));
      model->blocks->ptr<BlockImpl>(2)->down->weight.set_(at::full({31, 12}, 0.02).t());
      model->head.set_data(model->head.detach().t().contiguous().t() * 0.5);
    });
    train(scene, *trainer, model, 2, 4);
    scene.note(*trainer, *model);
  });
}

// ---- writes in place ---------------------------------------------------------------------------------------------

TEST(Parameters, WritesInPlaceOutsideGatheredAreNoticed) {
  const Refusal wanted{{"blocks.1.up.weight", "written in place", "Gathered::kWrite"}};
  const auto weight_of = [](Tiny& model) { return model->blocks->ptr<BlockImpl>(1)->up->weight; };
  const auto mul = [&](Scene&, Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).mul_(0.5);
  };
  expect_noticed(mul, wanted);
  expect_noticed([&](Scene&, Tiny& model) { torch::nn::init::normal_(weight_of(model)); }, wanted);
  const auto through_view = [&](Scene&, Tiny& model) {
    const at::NoGradGuard no_grad;
    weight_of(model).narrow(0, 3, 4).zero_();
  };
  expect_noticed(through_view, wanted);
  expect_noticed([&](Scene&, Tiny& model) { weight_of(model).detach().clamp_(-0.01, 0.01); }, wanted);
}

TEST(Parameters, WriteBetweenBackwardAndStepIsNoticed) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        trainer->backward(loss_of(scene, model, 1));
        {
          const at::NoGradGuard no_grad;
          model->head.mul_(0.5);
        }
        scene.refused([&] { trainer->step(); }, {{"head", "written in place", "kWrite"}});
      },
      {.timeout_s = kShort});
}

TEST(Parameters, WriteOutsideAGuardOfSomeUnitsIsNoticed) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused(
            [&] {
              Gathered guard(*trainer->engine(), {model->blocks->ptr<BlockImpl>(1)->up->weight}, Gathered::kWrite);
              {
                const at::NoGradGuard no_grad;
                model->blocks->ptr<BlockImpl>(1)->up->weight.mul_(0.5);
                model->blocks->ptr<BlockImpl>(2)->up->weight.mul_(0.5);
              }
              guard.close();
              trainer->backward(loss_of(scene, model, 1));
            },
            {{"blocks.2.up.weight", "written in place", "kWrite"}});
      },
      {.timeout_s = kShort});
}

TEST(Parameters, WeightClippingAndDecayByHandUnderGathered) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 4; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->write([&] {
        for (at::Tensor& parameter : model->parameters()) parameter.clamp_(-0.3, 0.3);
        model->head.detach().mul_(0.9);
        model->embedding->weight.copy_(model->embedding->weight * 0.5 + model->head * 0.5);
      });
    }
    scene.note(*trainer, *model);
  });
}

// An exponential mean of the weights, swapped in for an evaluation and out again.
TEST(Parameters, MeanOfWeightsSwappedInAndOut) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    std::vector<at::Tensor> mean;
    const auto parameters = model->parameters();
    trainer->read([&] {
      for (const at::Tensor& parameter : parameters) mean.push_back(parameter.detach().clone());
    });
    const auto swap = [&] {
      trainer->write([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) {
          const at::Tensor own = parameters[i].detach().clone();
          parameters[i].detach().copy_(mean[i]);
          mean[i] = own;
        }
      });
    };
    for (std::int64_t step = 0; step < 3; ++step) {
      train(scene, *trainer, model, step, step + 1);
      trainer->read([&] {
        for (std::size_t i = 0; i < mean.size(); ++i) mean[i].lerp_(parameters[i].detach(), 0.5);
      });
      swap();
      const at::NoGradGuard no_grad;
      scene.note(model->forward(batch_of(5).tokens, batch_of(5).targets).item<double>());
      swap();
    }
    scene.note(*trainer, *model);
  });
}

TEST(Parameters, EmbeddingThatWritesInForwardIsRefusedByName) {
  struct Normed : torch::nn::Module {
    Normed() {
      table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(19, 6).max_norm(1.0)));
      out = register_module("out", torch::nn::Linear(6, 3));
    }
    torch::nn::Embedding table{nullptr};
    torch::nn::Linear out{nullptr};
  };
  on_matrix(
      [](Scene& scene) {
        const auto model = seeded([] { return std::make_shared<Normed>(); });
        scene.refused([&] { scene.trainer(model); }, {{"table", "max_norm", "hint"}});
      },
      {.adjust = linear_units, .timeout_s = kShort});
}

// ---- frozen ------------------------------------------------------------------------------------------------------

TEST(Parameters, UnfreezingByHandWhatWasFrozenIsNoticed) {
  const auto unfreeze = [](Scene&, Tiny& model) {
    for (at::Tensor& parameter : model->blocks[0]->parameters()) parameter.requires_grad_(true);
  };
  expect_noticed(unfreeze, {{"blocks.0.", "frozen", "set_trainable"}}, {.frozen_first_block = true});
}

// ---- a second Engine ---------------------------------------------------------------------------------------------

TEST(Parameters, SecondEngineIsRefusedWhileTheFirstLives) {
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto trainer = scene.trainer(model);
        train(scene, *trainer, model, 0, 1);
        scene.refused([&] { scene.trainer(model); }, {{"another Engine", "hint"}});
        scene.refused([&] { scene.trainer(model->blocks.ptr()->children()[1], linear_units); }, {{"another Engine"}});
      },
      {.timeout_s = kShort});
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
  on_matrix(
      [](Scene& scene) {
        Tiny model = tiny();
        const auto sharer = seeded([&] { return std::make_shared<SharerImpl>(model->head); });
        const auto trainer = scene.trainer(model);
        scene.refused([&] { scene.trainer(sharer, linear_units); }, {{"shared", "another Engine"}});
      },
      {.timeout_s = kShort});
}

/// All placements, one after the other.
Adjust placed_as(const Placed& placed) {
  return [=](Strategy& s) { s.strategy = placed.kind, s.host_sharing = placed.shared; };
}

TEST(Parameters, EnginesInSuccessionKeepValues) {
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

// Masters in fp32 outlive Engines in 16 bits: an Engine in fp32 shows them.
TEST(Parameters, EnginesInSuccessionKeepMasters) {
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
            // A split master's high half is not always the nearest: it may be the neighbour.
            EXPECT_LE((again - rounded[i].second).abs().max().item<double>(),
                      rounded[i].second.abs().max().item<double>() * 0x1p-7)
                << masters[i].first;
          }
          // Halfway between two numbers of 16 bits: masters in one piece and split ones round that differently.
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

// Between two Engines the program owns the parameters again, if they were not sharded.
TEST(Parameters, WritesBetweenTwoEnginesCount) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const double tolerance = dtype == DType::kF32 ? 1e-5 : 1e-2;
    expect_like_plain(
        [&](Scene& scene) {
          Mlp model = mlp(5, 9, 3);
          for (std::int64_t round = 0; round < 2; ++round) {
            const Adjust adjust = [&](Strategy& s) {
              if (round == 0) s.strategy = ShardingStrategy::kNoShard;
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
          scene.trainer(model, [&](Strategy& s) { s.strategy = ShardingStrategy::kShardGradients; }).reset();
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

TEST(Parameters, WhatAnEngineShardedIsRefusedOnceItIsGone) {
  on_matrix(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        scene.trainer(model).reset();
        const ShardingStrategy kind = scene.strategy().strategy;
        const bool sharded = scene.mesh().world_size() > 1 &&
                             (kind == ShardingStrategy::kFullShard || kind == ShardingStrategy::kShardGradOp);
        const at::NoGradGuard no_grad;
        for (const auto& call : std::vector<Trainer::Action>{[&] { model->first->weight.mul_(0.5); },
                                                             [&] { (void)model->first->weight.sum(); },
                                                             [&] { (void)model->forward(noise(0, 5)); }}) {
          if (sharded) {
            scene.refused(call, {{"first", "sharded by an Engine that is gone", "hint"}, std::nullopt});
          } else {
            EXPECT_NO_THROW(call());
          }
        }
      },
      {.adjust = linear_units});
}

TEST(Parameters, LoadedBetweenTwoEngines) {
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

// ---- reading what is released ------------------------------------------------------------------------------------

TEST(Parameters, ReadingReleasedMemorySaysShardedAndGathered) {
  on_matrix([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    train(scene, *trainer, model, 0, 1);
    const std::vector<Trainer::Action> reads = {
        [&] { (void)model->head.data_ptr<float>(); },
        [&] { (void)model->head.const_data_ptr<float>(); },
        [&] { (void)model->head.mutable_data_ptr<float>(); },
        [&] { (void)model->head.accessor<float, 2>(); },
        [&] { (void)model->blocks->ptr<BlockImpl>(1)->up->bias.data_ptr<float>(); },
        [&] {
          std::stringstream file;
          torch::save(model, file);
        },
        [&] {
          std::stringstream file;
          torch::save(model->head, file);
        }};
    for (const auto& read : reads) {
      train(scene, *trainer, model, 1, 2);           // whatever was gathered is released
      const bool saves = &read - reads.data() >= 5;  // through operators, which gather, or through a pointer
      if (scene.is_sharded() && saves) {
        try {
          read();
        } catch (const c10::Error& error) {
          EXPECT_NE(std::string(error.what()).find("tessera::Gathered"), std::string::npos) << error.what();
        }
      } else if (scene.is_sharded()) {
        scene.refused(read, {{"sharded", "tessera::Gathered", "unit "}, std::nullopt});
      } else {
        EXPECT_NO_THROW(read());
      }
      trainer->read([&] { EXPECT_NO_THROW(read()); });
    }
    train(scene, *trainer, model, 1, 2);
  });
}

}  // namespace
}  // namespace tessera::testing
