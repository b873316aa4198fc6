// What real modules do to a training engine: tie, freeze, share, skip, recompute, convert and fail. Each property is
// checked on every number of ranks and on one strategy of each placement, against an unsharded run where there is one.

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <optional>

#include "tessera/error.h"
#include "train_helpers.h"

namespace tessera::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks[] = {1, 2, 3, 4, 8};
constexpr ShardingStrategy kOnePerPlacement[] = {
    ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients, ShardingStrategy::kShardGradOp,
    ShardingStrategy::kFullShard};
constexpr double kTolerance =
    2e-3;  // sums in another order, amplified by Adam's division (see strategies_test.cc)

TrainOptions options_for(TinyOptions model, std::int64_t accumulation = 1) {
  TrainOptions options;
  options.model = model;
  options.batch = 24 * accumulation;  // divides by every number of ranks
  return options;
}

using Adjust = std::function<void(Strategy&)>;

Strategy strategy_for(ShardingStrategy kind, const Adjust& adjust = nullptr, DType dtype = DType::kF32) {
  Strategy strategy = tiny_strategy(kind, dtype);
  strategy.gradient_clipping = 0.5;
  if (adjust) adjust(strategy);
  return strategy;
}

/// Trains on every number of ranks under every placement: the same bits among strategies, close to the unsharded run.
/// `look` sees each run.
void expect_strategies_agree(
    const TrainOptions& options, const Adjust& adjust = nullptr,
    const std::function<void(const Trained&, const Trained& plain)>& look = nullptr) {
  const Trained plain = train_plainly(strategy_for(ShardingStrategy::kNoShard, adjust), options);
  for (int ranks : kRanks) {
    std::optional<Trained> first;
    for (ShardingStrategy kind : kOnePerPlacement) {
      SCOPED_TRACE(name_of(kind) + " on " + std::to_string(ranks) + " ranks");
      const Trained trained = train_on_threads({.ranks = ranks}, strategy_for(kind, adjust), options);
      if (first) expect_same_bits(trained, *first, "the first strategy");
      EXPECT_LT(largest_difference(trained, plain), kTolerance);
      for (std::size_t i = 0; i < plain.steps.size(); ++i) {
        EXPECT_NEAR(trained.steps[i].grad_norm / plain.steps[i].grad_norm, 1, 1e-3) << "step " << i;
        EXPECT_EQ(trained.steps[i].planned, trained.steps[i].allocated) << "step " << i;
      }
      if (look) look(trained, plain);
      if (!first) first = trained;
    }
  }
}

/// Parameters whose names begin with `prefix` have the bits they were made with.
void expect_untouched(const Trained& trained, const TinyOptions& model, const std::string& prefix) {
  const auto before = values_of(*make_tiny(model, false));
  int found = 0;
  for (std::size_t i = 0; i < before.size(); ++i) {
    const bool same = same_bits(trained.values[i].second, before[i].second);
    if (before[i].first.starts_with(prefix)) {
      ++found;
      EXPECT_TRUE(same) << before[i].first;
    } else if (before[i].first == "embedding.weight") {
      EXPECT_FALSE(same) << "nothing was trained";
    }
  }
  EXPECT_GT(found, 0);
}

// ---- shapes of modules -------------------------------------------------------------------------------------------

TEST(Awkward, TiedHead) { expect_strategies_agree(options_for({.tied_head = true})); }

TEST(Awkward, FrozenBlockKeepsItsBits) {
  const TrainOptions options = options_for({.frozen_first_block = true});
  expect_strategies_agree(options, nullptr, [&](const Trained& trained, const Trained&) {
    expect_untouched(trained, options.model, "blocks.0.");
  });
}

TEST(Awkward, UnusedBlockIsLeftAloneEvenByWeightDecay) {
  const TrainOptions options = options_for({.blocks = 2, .unused_block = true});
  expect_strategies_agree(
      options, [](Strategy& s) { s.optimizer.weight_decay = 0.1; },
      [&](const Trained& trained, const Trained&) { expect_untouched(trained, options.model, "blocks.2."); });
}

TEST(Awkward, BlockUsedTwice) { expect_strategies_agree(options_for({.shared_block = true})); }

TEST(Awkward, FewerElementsThanRanks) {
  expect_strategies_agree(options_for({.vocab = 3, .width = 1, .hidden = 1, .blocks = 2}));
}

TEST(Awkward, EverythingAtOnce) {
  expect_strategies_agree(options_for(
      {.tied_head = true, .frozen_first_block = true, .unused_block = true, .shared_block = true}));
}

// ---- recomputation -----------------------------------------------------------------------------------------------

TEST(Awkward, RecomputationChangesNoBit) {
  const TrainOptions plainly = options_for({});
  const TrainOptions again = options_for({.recompute = true});
  for (int ranks : kRanks) {
    for (ShardingStrategy kind : kOnePerPlacement) {
      const Trained wanted = train_on_threads({.ranks = ranks}, strategy_for(kind), plainly);
      const Trained got = train_on_threads({.ranks = ranks}, strategy_for(kind), again);
      expect_same_bits(got, wanted, name_of(kind) + " on " + std::to_string(ranks) + " ranks");
    }
  }
}

// A block that is used twice *and* recomputed gives two gradients a backward. Added before the reduction (NO_SHARD, one
// rank) they have the bits of the run without recomputation. Elsewhere the unit may have been reduced when the second
// one comes: sum(a) + sum(b) instead of sum(a + b), equal up to rounding, and the same on every rank.
TEST(Awkward, RecomputationOfABlockUsedTwice) {
  const TrainOptions plainly = options_for({.shared_block = true});
  const TrainOptions again = options_for({.shared_block = true, .recompute = true});
  for (int ranks : kRanks) {
    for (ShardingStrategy kind : kOnePerPlacement) {
      const std::string what = name_of(kind) + " on " + std::to_string(ranks) + " ranks";
      const Trained wanted = train_on_threads({.ranks = ranks}, strategy_for(kind), plainly);
      const Trained got = train_on_threads({.ranks = ranks}, strategy_for(kind), again);
      EXPECT_LT(largest_difference(got, wanted), kTolerance) << what;
      if (ranks == 1 || kind == ShardingStrategy::kNoShard) expect_same_bits(got, wanted, what);
    }
  }
}

// ---- units, prefetch, dtypes -------------------------------------------------------------------------------------

TEST(Awkward, AnyCutIntoUnitsGivesTheSameValues) {
  const auto classes = [](std::vector<std::string> names) { return UnitsConfig{std::move(names), {}, 0}; };
  const auto modules = [](std::vector<std::string> paths) { return UnitsConfig{{}, std::move(paths), 0}; };
  const auto size = [](std::int64_t min_numel) { return UnitsConfig{{}, {}, min_numel}; };
  const std::vector<std::pair<std::string, UnitsConfig>> cuts = {
      {"root only", {}},
      {"by class", classes({"Block"})},
      {"by module", modules({"blocks.0", "blocks.2.up", "embedding"})},
      {"by size", size(300)},
      {"by a size nothing reaches", size(1 << 20)},
      {"every leaf", size(1)},
      {"nested", classes({"Block", "Linear"})},
      {"nested, outer one empty", classes({"ModuleList", "LayerNorm", "Block"})}};
  for (const auto& [name, units] : cuts) {
    SCOPED_TRACE(name);
    expect_strategies_agree(options_for({}), [&units = units](Strategy& s) { s.units = units; });
  }
}

TEST(Awkward, UnitsThatDoNotExistAreNamed) {
  const auto make = [] {
    run_ranks({.ranks = 2}, [](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
      strategy.units.classes = {"Blok"};
      Engine(make_tiny({}, true), strategy, mesh);
    });
  };
  try {
    make();
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.exit_code(), ExitCode::kConfig);
    EXPECT_THAT(error.message(), HasSubstr("Blok"));
    EXPECT_THAT(error.message(), HasSubstr("Block"));
  }
}

TEST(Awkward, PrefetchChangesNoBit) {
  for (int ranks : {2, 3}) {
    const TrainOptions options = options_for({.blocks = 4});
    const Trained wanted =
        train_on_threads({.ranks = ranks}, strategy_for(ShardingStrategy::kNoShard), options);
    for (std::int64_t prefetch : {0, 1, 2, 5}) {
      for (ShardingStrategy kind : {ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard}) {
        const Adjust adjust = [&](Strategy& s) { s.prefetch = prefetch; };
        const Trained got = train_on_threads({.ranks = ranks}, strategy_for(kind, adjust), options);
        expect_same_bits(got, wanted, name_of(kind) + ", prefetch " + std::to_string(prefetch));
        EXPECT_EQ(got.traffic.prefetched_gathers > 0, prefetch > 0);
      }
    }
  }
}

TEST(Awkward, LastMicrobatchSyncEqualsTheUnshardedRun) {
  expect_strategies_agree(options_for({}, 2), [](Strategy& s) {
    s.gradient_accumulation = 2;
    s.gradient_sync = GradientSync::kLastMicrobatch;
  });
}

TEST(Awkward, SixteenBitGradientsOnTheWireGiveTheSameBitsUnderEveryStrategy) {
  for (GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    for (int ranks : kRanks) {
      std::optional<Trained> first;
      for (ShardingStrategy kind : kOnePerPlacement) {
        const Adjust adjust = [&](Strategy& s) {
          s.mixed_precision.reduce = DType::kBF16;
          s.gradient_accumulation = 2;
          s.gradient_sync = sync;
        };
        const Trained trained =
            train_on_threads({.ranks = ranks}, strategy_for(kind, adjust, DType::kBF16), options_for({}, 2));
        if (!first) first = trained;
        expect_same_bits(trained, *first, name_of(kind) + " on " + std::to_string(ranks) + " ranks");
      }
    }
  }
}

TEST(Awkward, DeferredAndEagerStartsTrainAlike) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (ShardingStrategy kind : kOnePerPlacement) {
      TrainOptions options = options_for({.tied_head = true});
      const Trained deferred = train_on_threads({.ranks = 3}, strategy_for(kind, nullptr, dtype), options);
      options.deferred = false;
      const Trained eager = train_on_threads({.ranks = 3}, strategy_for(kind, nullptr, dtype), options);
      expect_same_bits(deferred, eager, name_of(kind));
    }
  }
}

// ---- own loops ---------------------------------------------------------------------------------------------------

at::Tensor rows_of(const at::Tensor& batch, const Mesh& mesh) {
  const std::int64_t rows = batch.size(0) / mesh.world_size();
  return batch.narrow(0, mesh.rank() * rows, rows);
}

/// Tiny on this rank, and its batches.
struct Session {
  explicit Session(const Mesh& mesh, const Strategy& strategy, TinyOptions options = {})
      : mesh(mesh), model(make_tiny(options, true)), engine(model, strategy, mesh) {}
  at::Tensor loss(std::size_t i) {
    const Batch& batch = batches[i % batches.size()];
    return model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh));
  }
  StepResult train(std::size_t i) {
    engine.backward(loss(i));
    return engine.step();
  }
  std::vector<std::pair<std::string, at::Tensor>> values() {
    const Gathered gathered(engine);
    return values_of(*model);
  }

  const Mesh& mesh;
  Tiny model;
  Engine engine;
  std::vector<Batch> batches = make_batches(6, 24, 5, 19);
};

using Values = std::vector<std::pair<std::string, at::Tensor>>;

bool all_same_bits(const Values& a, const Values& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i].second, b[i].second)) return false;
  }
  return a.size() == b.size();
}

void on_each_placement(int ranks, const std::function<void(const Mesh&, const Strategy&)>& body,
                       const Adjust& adjust = nullptr, DType dtype = DType::kF32) {
  for (ShardingStrategy kind : kOnePerPlacement) {
    SCOPED_TRACE(name_of(kind));
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { body(mesh, strategy_for(kind, adjust, dtype)); });
  }
}

// Names bound in a module, so that a Linear converted to bf16 sits between fp32 ones, and a batch norm is kept fp32.
struct MixedImpl : torch::nn::Module {
  MixedImpl() {
    embedding = register_module("embedding", torch::nn::Embedding(19, 12));
    narrow = register_module("narrow", torch::nn::Linear(12, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(12));
    head = register_module("head", torch::nn::Linear(12, 19));
    narrow->to(at::kBFloat16);
  }
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets) {
    at::Tensor x = embedding(tokens).flatten(0, 1);
    x = x + narrow(x.to(narrow->weight.scalar_type())).to(x.scalar_type());
    x = norm(x).to(head->weight.scalar_type());
    return at::cross_entropy_loss(head(x).to(at::kFloat), targets.flatten());
  }
  torch::nn::Embedding embedding{nullptr};
  torch::nn::Linear narrow{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Mixed);

Mixed make_mixed() {
  static std::mutex generator_mutex;
  const std::lock_guard lock(generator_mutex);
  at::manual_seed(5);
  return Mixed();
}

TEST(Awkward, MixedDtypesAndAKeptBatchNorm) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    std::optional<Values> first;
    const auto batches = make_batches(4, 24, 5, 19);
    on_each_placement(
        3,
        [&](const Mesh& mesh, Strategy strategy) {
          strategy.units.classes = {"Linear"};
          Mixed model = make_mixed();
          Engine engine(model, strategy, mesh);
          EXPECT_EQ(model->norm->weight.scalar_type(), at::kFloat);  // keep_fp32's default
          EXPECT_EQ(model->narrow->weight.scalar_type(), at::kBFloat16);
          EXPECT_EQ(model->head->weight.scalar_type(), dtype == DType::kF32 ? at::kFloat : at::kBFloat16);
          double before = 0, after = 0;
          for (int i = 0; i < 8; ++i) {
            const Batch& batch = batches[i % 4];
            engine.backward(model->forward(rows_of(batch.tokens, mesh), rows_of(batch.targets, mesh)));
            const StepResult result = engine.step();
            (i < 4 ? before : after) += result.loss;
            EXPECT_EQ(result.planned, result.allocated);
          }
          EXPECT_LT(after, before);
          const Gathered gathered(engine);
          if (mesh.rank() != 0) return;
          const Values values = values_of(*model);
          if (!first) first = values;
          EXPECT_TRUE(all_same_bits(values, *first));
        },
        nullptr, dtype);
  }
}

/// Tiny's forward without block `skip`.
at::Tensor forward_without(TinyImpl& model, std::int64_t skip, const at::Tensor& tokens,
                           const at::Tensor& targets) {
  at::Tensor x = model.embedding(tokens);
  for (std::int64_t i = 0; i < model.options.blocks; ++i) {
    if (i != skip) x = std::dynamic_pointer_cast<BlockImpl>(model.blocks->ptr(i))->forward(x);
  }
  return at::cross_entropy_loss(at::linear(x, model.head).flatten(0, 1), targets.flatten());
}

TEST(Awkward, RankThatSkipsABlockGivesItAZeroGradient) {
  const Strategy strategy = strategy_for(ShardingStrategy::kNoShard);
  const auto batches = make_batches(4, 24, 5, 19);
  Tiny reference = make_tiny({}, false);
  torch::optim::AdamW optimizer(reference->parameters(),
                                torch::optim::AdamWOptions(strategy.optimizer.lr).weight_decay(0.01));
  for (const Batch& batch : batches) {
    optimizer.zero_grad();
    const auto half = [&](int rank, int skip) {
      return forward_without(*reference, skip, batch.tokens.narrow(0, 12 * rank, 12),
                             batch.targets.narrow(0, 12 * rank, 12));
    };
    ((half(0, -1) + half(1, 1)) / 2).backward();
    torch::nn::utils::clip_grad_norm_(reference->parameters(), strategy.gradient_clipping);
    optimizer.step();
  }
  const Values wanted = values_of(*reference);
  for (ShardingStrategy kind :
       {ShardingStrategy::kNoShard, ShardingStrategy::kShardOptimizer, ShardingStrategy::kShardGradients}) {
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Tiny model = make_tiny({}, true);
      Engine engine(model, strategy_for(kind), mesh);
      for (const Batch& batch : batches) {
        engine.backward(forward_without(*model, mesh.rank() == 1 ? 1 : -1, rows_of(batch.tokens, mesh),
                                        rows_of(batch.targets, mesh)));
        engine.step();
      }
      const Values got = values_of(*model);
      for (std::size_t i = 0; i < wanted.size(); ++i) {
        EXPECT_LT((got[i].second - wanted[i].second).abs().max().item<double>(), kTolerance)
            << name_of(kind) << ", " << wanted[i].first;
      }
    });
  }
}

// ---- reading and writing by hand ---------------------------------------------------------------------------------

TEST(Awkward, GatheredGivesPointersAndKeepsWrites) {
  on_each_placement(3, [](const Mesh& mesh, const Strategy& strategy) {
    Session session(mesh, strategy);
    session.train(0);
    at::Tensor weight = session.model->head;
    const std::int64_t numel = weight.numel();
    {
      Gathered guard(session.engine, Gathered::kWrite);
      auto* values = weight.mutable_data_ptr<float>();
      // Only rank 0's changes count; the others' are overwritten.
      for (std::int64_t i = 0; i < numel; ++i) values[i] = static_cast<float>(mesh.rank() == 0 ? i : -1);
      guard.close();
    }
    {
      const Gathered guard(session.engine, {weight});
      for (std::int64_t i = 0; i < numel; ++i)
        ASSERT_EQ(weight.const_data_ptr<float>()[i], static_cast<float>(i));
    }
    // An operator that reads the parameter sees the same, and training goes on from there.
    EXPECT_EQ(weight.detach().sum().item<double>(), static_cast<double>(numel * (numel - 1) / 2));
    const StepResult result = session.train(1);
    EXPECT_FALSE(result.overflow);
    EXPECT_EQ(result.planned, result.allocated);
    const Gathered guard(session.engine, {weight});
    EXPECT_NEAR(weight.const_data_ptr<float>()[numel - 1], static_cast<double>(numel - 1), 0.1);
  });
}

TEST(Awkward, PointerWithoutGatheredIsRefusedWhereParametersAreSharded) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard));
    session.train(0);
    EXPECT_THROW(session.model->head.const_data_ptr<float>(), c10::Error);
  });
}

// Steps so small that most bf16 values stay while their masters move: a write that forgot the masters would lose them.
TEST(Awkward, WriteThatChangesNothingKeepsMastersExact) {
  const Adjust small_steps = [](Strategy& s) { s.optimizer.lr = 1e-5; };
  const auto train = [](Session& session, bool write) {
    for (std::size_t i = 0; i < 40; ++i) {
      session.train(i);
      if (write && i % 5 == 0) Gathered(session.engine, Gathered::kWrite).close();
    }
    return session.values();
  };
  on_each_placement(
      2,
      [&](const Mesh& mesh, const Strategy& strategy) {
        Session untouched(mesh, strategy), written(mesh, strategy), start(mesh, strategy);
        const Values wanted = train(untouched, false);
        EXPECT_TRUE(all_same_bits(train(written, true), wanted));
        EXPECT_FALSE(all_same_bits(start.values(), wanted))
            << "the masters never moved a value: the test shows nothing";
      },
      small_steps, DType::kBF16);
}

// ---- wrong use and failures --------------------------------------------------------------------------------------

TEST(Awkward, CallsInTheWrongOrderAreRefusedAndHarmless) {
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

TEST(Awkward, NaNOnOneRankSkipsTheStepOnAll) {
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
    // Nothing of it is left: moments, bias corrections and gradients are as if the step had not been tried.
    EXPECT_FALSE(session.train(2).overflow);
    spared.train(2);
    EXPECT_TRUE(all_same_bits(session.values(), spared.values()));
  });
}

/// Runs `ranks` ranks of which rank 1 fails in `fail`, and returns what each rank's exception said.
std::vector<std::string> failures(ShardingStrategy kind, const std::function<at::Tensor(Session&)>& fail) {
  constexpr int kCount = 3;
  std::vector<std::string> said(kCount);
  const auto began = std::chrono::steady_clock::now();
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
  EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10));
  return said;
}

TEST(Awkward, ExceptionInForwardEndsAllRanks) {
  for (ShardingStrategy kind : kOnePerPlacement) {
    const auto said = failures(
        kind, [](Session&) -> at::Tensor { throw std::runtime_error("the user's dog ate a batch"); });
    EXPECT_THAT(said[1], HasSubstr("dog"));
    for (int other : {0, 2}) EXPECT_THAT(said[other], HasSubstr("rank 1")) << name_of(kind);
  }
}

TEST(Awkward, ExceptionInBackwardReachesAllRanksWithItsMessage) {
  for (ShardingStrategy kind : kOnePerPlacement) {
    const auto said = failures(kind, [](Session& session) {
      const Batch& batch = session.batches[0];
      at::Tensor x = session.model->embedding(batch.tokens);
      x.register_hook(
          [](const at::Tensor&) -> at::Tensor { throw std::runtime_error("a hook with a toothache"); });
      for (const auto& block : *session.model->blocks)
        x = std::dynamic_pointer_cast<BlockImpl>(block)->forward(x);
      return at::cross_entropy_loss(at::linear(x, session.model->head).flatten(0, 1),
                                    batch.targets.flatten());
    });
    for (const std::string& message : said) EXPECT_THAT(message, HasSubstr("toothache")) << name_of(kind);
  }
}

TEST(Awkward, ParametersOutliveTheEngineWhereReplicatedAndSayWhyWhereNot) {
  on_each_placement(2, [](const Mesh& mesh, const Strategy& strategy) {
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
    const bool sharded = strategy.strategy == ShardingStrategy::kShardGradOp ||
                         strategy.strategy == ShardingStrategy::kFullShard;
    if (!sharded) {
      EXPECT_TRUE(all_same_bits(values_of(*model), at_the_end));
      return;
    }
    try {
      values_of(*model);
      ADD_FAILURE() << "read without memory";
    } catch (const c10::Error& error) {
      EXPECT_THAT(std::string(error.what()), HasSubstr("sharded by an Engine that is gone"));
    }
  });
}

TEST(Awkward, PlanOverTheLimitIsRefusedWithTheTableAndAWayOut) {
  Topology topology;
  topology.world_size = 4;
  const auto bytes = [&](ShardingStrategy kind) {
    return plan_memory(*make_tiny({}, true), strategy_for(kind), topology).use().total();
  };
  const std::int64_t limit = bytes(ShardingStrategy::kShardGradients);
  ASSERT_LT(limit, bytes(ShardingStrategy::kShardOptimizer));
  const auto start = [&](ShardingStrategy kind, std::int64_t limit_bytes) {
    run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
      Strategy strategy = strategy_for(kind);
      strategy.memory.limit_bytes = limit_bytes;
      Session session(mesh, strategy);
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
  EXPECT_THAT(
      refusal(ShardingStrategy::kNoShard, limit),
      AllOf(HasSubstr("/memory/limit"), HasSubstr("optimizer "), HasSubstr("fits is SHARD_GRADIENTS")));
  EXPECT_NO_THROW(start(ShardingStrategy::kShardGradients, limit));
  EXPECT_THAT(refusal(ShardingStrategy::kFullShard, 100), HasSubstr("no strategy fits"));
}

// ---- traffic -----------------------------------------------------------------------------------------------------

// FULL_SHARD, U block units, S = min(prefetch + 1, U) shared slots, and one slot of the root's own.
//
// Forward reads root, 0, 1, ..., U-1, root: the root is gathered once and stays, each block is gathered once. When
// backward begins, the slots hold the last S blocks, which are those it reads first (a slot is taken from the unit
// needed last); the other U - S are gathered again. Prefetching begins the same gathers earlier, never more, since it
// may only push out what is needed later. So the first microbatch of a step gathers 1 + U + (U - S).
// Values stay valid until the step, so the next microbatch begins with the root and blocks 0..S-1 in place, and
// gathers U - S in each direction.
// SHARD_GRAD_OP gathers all 1 + U units once a step. Each microbatch reduces each of the 1 + U units once.
TEST(Awkward, CollectivesAreCountedAndPlannedExactly) {
  const auto expect_counts = [](const Mesh& mesh, Strategy strategy, std::int64_t blocks) {
    Session session(mesh, strategy, {.blocks = blocks});
    const std::int64_t microbatches = strategy.gradient_accumulation;
    const std::int64_t slots = std::min(strategy.prefetch + 1, blocks);
    std::int64_t gathers = 1 + blocks + (blocks - slots) + (microbatches - 1) * 2 * (blocks - slots);
    if (strategy.strategy == ShardingStrategy::kShardGradOp) gathers = 1 + blocks;
    if (mesh.world_size() == 1) gathers = 0;
    for (int step = 0; step < 4; ++step) {
      const TrafficCounts before = session.engine.traffic();
      for (std::int64_t i = 0; i < microbatches; ++i) session.engine.backward(session.loss(i));
      const StepResult result = session.engine.step();
      const TrafficCounts after = session.engine.traffic();
      EXPECT_EQ(result.planned, result.allocated);
      EXPECT_EQ(after.gathers - before.gathers, gathers) << "step " << step;
      EXPECT_EQ(after.reductions - before.reductions, microbatches * (1 + blocks)) << "step " << step;
      EXPECT_EQ(after.overflow_slots, 0) << "step " << step;
      // From the second step on the schedule is known: all but the very first unit are gathered before they are used.
      const std::int64_t early = gathers > 0 && strategy.prefetch > 0 ? gathers - 1 : 0;
      if (step == 0) continue;
      EXPECT_EQ(after.prefetched_gathers - before.prefetched_gathers, early) << "step " << step;
      EXPECT_EQ(after.overflow_buckets, before.overflow_buckets) << "step " << step;
    }
  };
  for (int ranks : {1, 2, 3}) {
    for (ShardingStrategy kind : {ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard}) {
      for (std::int64_t prefetch : {0, 1, 2, 5}) {
        for (std::int64_t accumulation : {1, 2}) {
          SCOPED_TRACE(name_of(kind) + ", " + std::to_string(ranks) + " ranks, prefetch " +
                       std::to_string(prefetch) + ", accumulation " + std::to_string(accumulation));
          Strategy strategy = strategy_for(kind);
          strategy.prefetch = prefetch;
          strategy.gradient_accumulation = accumulation;
          run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { expect_counts(mesh, strategy, 4); });
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
