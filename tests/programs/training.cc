// Tests training loops: loops that every user writes, and loops that a few users write. Each loop gives the numbers of
// plain LibTorch.

#include <ATen/Functions.h>
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/transformer.h>

#include "tessera/recompute.h"
#include "tests/programs/models.h"

namespace tessera::testing {
namespace {

TEST(Training, EagerAndDeferredModulesTrainLikePlainLibTorch) {
  for (bool deferred : {false, true}) {
    expect_like_plain([&](Scene& scene) {
      Tiny model = tiny({}, deferred && !scene.is_plain());
      const auto trainer = scene.trainer(model);
      train(scene, *trainer, model, 0, 4);
      scene.note(*trainer, *model);
    });
  }
}

TEST(Training, AccumulatedMicrobatchesTrainLikePlainLibTorch) {
  for (GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    const Adjust adjust = [&](Strategy& s) { s.gradient_accumulation = 2, s.gradient_sync = sync; };
    expect_like_plain(
        [](Scene& scene) {
          Tiny model = tiny();
          const auto trainer = scene.trainer(model);
          for (std::int64_t step = 0; step < 3; ++step) {
            for (std::int64_t m = 0; m < 2; ++m) trainer->backward(loss_of(scene, model, step, m, 2));
            trainer->step();
          }
          scene.note(*trainer, *model);
        },
        {adjust});
  }
}

// ---- which parameters take part ----------------------------------------------------------------------------------

/// Runs Tiny's forward. Only the rows that `deep` [rows] names run through the last block. If `always` is true, the
/// block runs even with no rows.
at::Tensor forward_with_depth(TinyImpl& model, const at::Tensor& tokens, const at::Tensor& targets,
                              const at::Tensor& deep, bool always) {
  at::Tensor x = model.embedding(tokens);
  for (std::int64_t i = 0; i + 1 < model.options.blocks; ++i) x = model.blocks->ptr<BlockImpl>(i)->forward(x);
  const at::Tensor rows = deep.nonzero().flatten();
  if (rows.numel() > 0 || always) {
    const auto last = model.blocks->ptr<BlockImpl>(model.options.blocks - 1);
    x = x.index_copy(0, rows, last->forward(x.index_select(0, rows)));
  }
  return at::cross_entropy_loss(at::linear(x, model.head).flatten(0, 1), targets.flatten());
}

/// Trains one step. Only the rows from `begin` on of the global batch run through the last block.
void train_from_row(Scene& scene, Trainer& trainer, Tiny& model, std::int64_t step, std::int64_t begin,
                    bool always = false) {
  const Batch& batch = batch_of(step);
  const at::Tensor deep = at::arange(12) >= begin;
  trainer.backward(
      forward_with_depth(*model, scene.rows(batch.tokens), scene.rows(batch.targets), scene.rows(deep), always));
  trainer.step();
}

// There are more units than the plan has buckets, so the test would notice a unit that waits forever for a bucket.
TEST(Training, LastUnitUnusedForSomeStepsTrainsAgain) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny({.blocks = 10});
    const auto trainer = scene.trainer(model);
    std::int64_t overflows = 0;
    for (std::int64_t step = 0; step < 9; ++step) {
      train_from_row(scene, *trainer, model, step, step >= 3 && step < 6 ? 12 : 0);
      if (scene.is_plain()) continue;
      const Engine& engine = *trainer->engine();
      EXPECT_EQ(engine.allocated(), engine.plan().use) << "after step " << step;
      const std::int64_t now = engine.traffic().overflow_buckets;
      const bool has_buckets = scene.mesh().world_size() > 1 && scene.strategy().strategy != ShardingStrategy::kNoShard;
      const bool settled = step % 3 == 2;  // ranks may agree in steps 0, 3 and 6 on an order for later steps
      if (settled) {
        EXPECT_EQ(now, overflows) << "in step " << step;
      } else if (step == 3 && has_buckets) {
        EXPECT_GT(now, overflows) << "in step " << step;
      }
      overflows = now;
    }
    scene.note(*trainer, *model);
  });
}

TEST(Training, UnitUsedOnSomeRanksTrainsLikePlainLibTorch) {
  expect_like_plain([](Scene& scene) {
    // If there are two or three ranks, rank 0 does not run the block, except in one step. If ranks gather the block
    // together, such a step is an error (Misuse.UnitRunOnSomeRanksEndsInAnError), so then all ranks run the block.
    const bool together = scene.is_sharded();
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    for (std::int64_t step = 0; step < 4; ++step)
      train_from_row(scene, *trainer, model, step, step == 2 ? 0 : 6, together);
    scene.note(*trainer, *model);
  });
}

// ---- graphs ------------------------------------------------------------------------------------------------------

TEST(Training, SeveralLossesInAMicrobatchAddUp) {
  for (std::int64_t accumulation : {1, 2}) {
    for (GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
      const Adjust adjust = [&](Strategy& s) {
        linear_units(s);
        s.gradient_accumulation = accumulation;
        s.gradient_sync = sync;
      };
      expect_like_plain(
          [&](Scene& scene) {
            Mlp model = mlp(5, 9, 3);
            const auto trainer = scene.trainer(model);
            for (std::int64_t step = 0; step < 3; ++step) {
              for (std::int64_t m = 0; m < accumulation; ++m) {
                const at::Tensor hidden = at::tanh(model->first(scene.rows(noise(step, 5), m, accumulation)));
                const at::Tensor output = model->third(at::tanh(model->second(hidden)));
                trainer->backward(output.pow(2).mean(), {.retain_graph = true});
                trainer->backward((hidden - 0.5).pow(2).mean(), {.retain_graph = true});
                trainer->backward(output.abs().mean() * 0.3);
              }
              trainer->step();
            }
            scene.note(*trainer, *model);
          },
          {adjust});
    }
  }
}

TEST(Training, GradientPenaltyTrainsLikePlainLibTorch) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 1);
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 3; ++step) {
          const at::Tensor x = scene.rows(noise(step, 5)).clone().requires_grad_();
          const at::Tensor output = model->forward(x);
          const at::Tensor slope = torch::autograd::grad({output.sum()}, {x}, {}, true, /*create_graph=*/true)[0];
          trainer->backward(output.pow(2).mean() + (slope.norm(2, 1) - 1).pow(2).mean());
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

TEST(Training, EvaluationBetweenStepsDisturbsNothing) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    const Batch& held_out = batch_of(5);
    for (std::int64_t step = 0; step < 3; ++step) {
      train(scene, *trainer, model, step, step + 1);
      {
        const at::NoGradGuard no_grad;
        scene.note(model->forward(held_out.tokens, held_out.targets).item<double>());
      }
      {
        const c10::InferenceMode inference;
        scene.note(model->forward(held_out.tokens, held_out.targets).item<double>());
      }
    }
    scene.note(*trainer, *model);
  });
}

TEST(Training, EvaluationBeforeAnyStepOrInMidStepDisturbsNothing) {
  expect_like_plain([](Scene& scene) {
    Tiny model = tiny();
    const auto trainer = scene.trainer(model);
    const Batch& held_out = batch_of(5);
    const auto evaluate = [&] {
      const c10::InferenceMode inference;
      scene.note(model->forward(held_out.tokens, held_out.targets).item<double>());
    };
    evaluate();
    for (std::int64_t step = 0; step < 2; ++step) {
      trainer->backward(loss_of(scene, model, step));
      evaluate();
      trainer->step();
    }
    scene.note(*trainer, *model);
  });
}

TEST(Training, RecomputationTakesAnUndefinedInput) {
  expect_like_plain(
      [](Scene& scene) {
        Mlp model = mlp(5, 9, 3);
        const auto trainer = scene.trainer(model);
        const TensorFunction run = [&](const std::vector<at::Tensor>& inputs) {
          at::Tensor hidden = at::tanh(model->second(inputs[0]));
          if (inputs[1].defined()) hidden = hidden * inputs[1];
          return std::vector<at::Tensor>{hidden};
        };
        for (std::int64_t step = 0; step < 3; ++step) {
          const at::Tensor hidden = model->first(scene.rows(noise(step, 5)));
          trainer->backward(model->third(checkpoint(run, {hidden, at::Tensor()}).at(0)).pow(2).mean());
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {linear_units});
}

// ---- kinds of gradients and losses -------------------------------------------------------------------------------

struct BagImpl : torch::nn::Module {
  explicit BagImpl(bool tied) {
    table = register_module("table", torch::nn::Embedding(torch::nn::EmbeddingOptions(19, 6).sparse(true)));
    out = register_module("out", torch::nn::Linear(6, 19));
    if (tied) out->weight = out->register_parameter("weight_of_table", table->weight);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    return at::cross_entropy_loss(out(at::tanh(table(tokens))).flatten(0, 1).to(at::kFloat), targets.flatten());
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear out{nullptr};
};
TORCH_MODULE(Bag);

/// LibTorch's AdamW refuses sparse gradients, so the embedding of the plain run is dense.
Bag bag(const Scene& scene, bool tied) {
  Bag model = seeded([&] { return Bag(tied); });
  if (scene.is_plain()) model->table->options.sparse(false);
  return model;
}

TEST(Training, SparseEmbeddingTrainsLikePlainLibTorch) {
  for (std::int64_t accumulation : {1, 2}) {
    for (GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
      const Adjust adjust = [&](Strategy& s) {
        s.units.classes = {"Linear", "Embedding"};
        s.gradient_accumulation = accumulation;
        s.gradient_sync = sync;
      };
      expect_like_plain(
          [&](Scene& scene) {
            Bag model = bag(scene, accumulation == 1 && sync == GradientSync::kLastMicrobatch);
            const auto trainer = scene.trainer(model);
            for (std::int64_t step = 0; step < 3; ++step) {
              const Batch& batch = batch_of(step);
              for (std::int64_t m = 0; m < accumulation; ++m) {
                trainer->backward(model->forward(scene.rows(batch.tokens, m, accumulation),
                                                 scene.rows(batch.targets, m, accumulation)));
              }
              trainer->step();
            }
            scene.note(*trainer, *model);
          },
          {adjust});
    }
  }
}

TEST(Training, LossMayHaveAnyFloatingDtype) {
  for (at::ScalarType dtype : {at::kHalf, at::kBFloat16, at::kDouble}) {
    SCOPED_TRACE(toString(dtype));
    expect_like_plain(
        [&](Scene& scene) {
          Tiny model = tiny();
          const auto trainer = scene.trainer(model);
          for (std::int64_t step = 0; step < 3; ++step) {
            trainer->backward(loss_of(scene, model, step).to(dtype));
            trainer->step();
          }
          scene.note(*trainer, *model);
        },
        {.loss_tolerance = dtype == at::kDouble ? 1e-5 : 1e-2});  // bf16 rounds a rank's loss to eight bits
  }
}

// The loss scale exceeds the range of the loss's dtype, but no value overflows.
TEST(Training, HalfLossWithALargeLossScaleDoesNotOverflow) {
  for (bool sparse : {false, true}) {
    const Adjust adjust = [&](Strategy& s) {
      s.mixed_precision.loss_scale.initial = 65536;
      if (sparse) s.units.classes = {"Embedding"};
    };
    expect_like_plain(
        [&](Scene& scene) {
          Tiny model = sparse ? nullptr : tiny();
          Bag table = sparse ? bag(scene, false) : nullptr;
          const auto trainer = sparse ? scene.trainer(table) : scene.trainer(model);
          for (std::int64_t step = 0; step < 3; ++step) {
            const Batch& batch = batch_of(step);
            const at::Tensor tokens = scene.rows(batch.tokens), targets = scene.rows(batch.targets);
            const at::Tensor loss = sparse ? table->forward(tokens, targets) : model->forward(tokens, targets) * 0.25;
            trainer->backward(loss.to(at::kHalf));
            trainer->step();
            if (!scene.is_plain()) {
              EXPECT_EQ(trainer->engine()->steps_applied(), step + 1);
              EXPECT_EQ(trainer->engine()->loss_scale(), 65536);
            }
          }
          scene.note(*trainer, sparse ? static_cast<torch::nn::Module&>(*table) : *model);
        },
        {.adjust = adjust, .dtype = DType::kF16, .tolerance = 2e-3, .loss_tolerance = 5e-3});
  }
}

// ---- a model from LibTorch ---------------------------------------------------------------------------------------

/// A model with tied, frozen and unused parameters around torch::nn::Transformer.
struct TranslatorImpl : torch::nn::Module {
  TranslatorImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(19, 12));
    transformer = register_module("transformer", torch::nn::Transformer(torch::nn::TransformerOptions(12, 2)
                                                                            .num_encoder_layers(2)
                                                                            .num_decoder_layers(1)
                                                                            .dim_feedforward(17)
                                                                            .dropout(0.0)));
    unused = register_module("unused", torch::nn::Linear(7, 3));
    head = register_parameter("head", embedding->weight);
    for (at::Tensor& parameter : transformer->encoder.ptr()->children()[0]->children()[0]->parameters()) {
      parameter.requires_grad_(false);
    }
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    const at::Tensor x = embedding(tokens).transpose(0, 1);
    const at::Tensor y = transformer(x, x.flip(0)).transpose(0, 1);
    return at::cross_entropy_loss(at::linear(y, head).flatten(0, 1), targets.flatten());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Transformer transformer{nullptr};
  torch::nn::Linear unused{nullptr};
  at::Tensor head;
};
TORCH_MODULE(Translator);

TEST(Training, TransformerWithTiedFrozenAndUnusedParametersTrains) {
  expect_like_plain(
      [](Scene& scene) {
        Translator model = seeded([] { return Translator(); });
        const auto trainer = scene.trainer(model);
        for (std::int64_t step = 0; step < 3; ++step) {
          const Batch& batch = batch_of(step);
          trainer->backward(model->forward(scene.rows(batch.tokens), scene.rows(batch.targets)));
          trainer->step();
        }
        scene.note(*trainer, *model);
      },
      {[](Strategy& s) {
        s.units.classes = {"TransformerEncoderLayer", "TransformerDecoderLayer"};
      }});
}

}  // namespace
}  // namespace tessera::testing
