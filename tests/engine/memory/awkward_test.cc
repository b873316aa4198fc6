// Tests real modules, which tie, freeze, share, skip, recompute and convert parameters, and which fail. Each property
// is checked on every number of ranks and under one strategy for each placement, and compared with an unsharded run if
// there is one.

#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/linear.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <array>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include "runtime/border/throw.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace awkward_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kRanks[] = {1, 2, 3, 4, 8};
constexpr double kTolerance = 2e-3;  // sums in another order, amplified by Adam's division (see strategies_test.cc)

TrainOptions options_for(TinyOptions model, std::int64_t accumulation = 1) {
  TrainOptions options;
  options.model = model;
  options.batch = 24 * accumulation;  // every number of ranks divides this
  return options;
}

/// The variants of modules that are tested here. Variants, numbers of ranks, and placements make a grid
/// (tests/support/pairwise.h).
const std::string kDone[] = {"tied head",        "frozen block", "unused block",
                             "block used twice", "few elements", "everything at once",
                             "last microbatch",  "root only",    "by class",
                             "by module",        "by size",      "by a size nothing reaches",
                             "every leaf",       "nested",       "nested, outer one empty"};

/// Trains on several numbers of ranks under several placements. Checks that each run gives the same bits as a run under
/// NO_SHARD on as many ranks, and is close to the unsharded run. `done` is one of kDone. `look` is called for each run.
void expect_strategies_agree(const std::string& done, const TrainOptions& options, const Adjust& adjust = nullptr,
                             const std::function<void(const Trained&, const Trained& plain)>& look = nullptr) {
  const Trained plain = train_plainly(strategy_for(ShardingStrategy::kNoShard, adjust), options);
  const auto expect = [&](const Trained& trained) {
    EXPECT_LT(largest_difference(trained, plain), kTolerance);
    for (std::size_t i = 0; i < plain.steps.size(); ++i) {
      EXPECT_NEAR(trained.steps[i].grad_norm / plain.steps[i].grad_norm, 1, 1e-3) << "step " << i;
      EXPECT_EQ(trained.steps[i].planned, trained.steps[i].allocated) << "step " << i;
    }
    if (look) look(trained, plain);
  };
  MadeOnce<Trained> unsharded;
  for (const auto& [of, on, kind] : pairwise_of(kDone, kRanks, kOnePerPlacement)) {
    if (of != done) continue;
    const ThreadRanks ranks{.ranks = on};
    const std::string where = " on " + std::to_string(on) + " ranks";
    const Trained& first = unsharded(where, [&] {
      SCOPED_TRACE(done + ", NO_SHARD" + where);
      const Trained trained = train_on_threads(ranks, strategy_for(ShardingStrategy::kNoShard, adjust), options);
      expect(trained);
      return trained;
    });
    if (kind.kind == ShardingStrategy::kNoShard) continue;
    SCOPED_TRACE(done + ", " + name_of(kind) + where);
    const Trained trained = train_on_threads(ranks, strategy_for(kind, adjust), options);
    expect_same_bits(trained, first, "NO_SHARD");
    expect(trained);
  }
  EXPECT_TRUE(std::ranges::count(kDone, done)) << done;
}

/// Checks that parameters whose names begin with `prefix` have the bits with which they were made.
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

TEST(Awkward, TiedHeadTrainsAlikeUnderEveryStrategy) {
  expect_strategies_agree("tied head", options_for({.tied_head = true}));
}

TEST(Awkward, FrozenBlockKeepsItsBits) {
  const TrainOptions options = options_for({.frozen_first_block = true});
  expect_strategies_agree("frozen block", options, nullptr, [&](const Trained& trained, const Trained&) {
    expect_untouched(trained, options.model, "blocks.0.");
  });
}

TEST(Awkward, UnusedBlockStaysUntouchedByWeightDecay) {
  const TrainOptions options = options_for({.blocks = 2, .unused_block = true});
  expect_strategies_agree(
      "unused block", options, [](Strategy& s) { s.optimizer.weight_decay = 0.1; },
      [&](const Trained& trained, const Trained&) { expect_untouched(trained, options.model, "blocks.2."); });
}

TEST(Awkward, BlockUsedTwiceTrainsAlikeUnderEveryStrategy) {
  expect_strategies_agree("block used twice", options_for({.shared_block = true}));
}

TEST(Awkward, FewerElementsThanRanksTrainAlikeUnderEveryStrategy) {
  expect_strategies_agree("few elements", options_for({.vocab = 3, .width = 1, .hidden = 1, .blocks = 2}));
}

TEST(Awkward, AllOddParametersTogetherTrainAlike) {
  expect_strategies_agree(
      "everything at once",
      options_for({.tied_head = true, .frozen_first_block = true, .unused_block = true, .shared_block = true}));
}

// ---- recomputation -----------------------------------------------------------------------------------------------

TEST(Awkward, RecomputationChangesNoBits) {
  const TrainOptions plainly = options_for({});
  const TrainOptions again = options_for({.recompute = true});
  for (int ranks : kRanks) {
    const Trained wanted = train_on_threads({.ranks = ranks}, strategy_for(ShardingStrategy::kNoShard), plainly);
    for (const Placed& kind : kOnePerPlacement) {
      const Trained got = train_on_threads({.ranks = ranks}, strategy_for(kind), again);
      expect_same_bits(got, wanted, name_of(kind) + " on " + std::to_string(ranks) + " ranks");
    }
  }
}

// A block that is used twice *and* recomputed gives two gradients in one backward. The unit may have been reduced when
// the second gradient comes. The result is then sum(a) + sum(b) instead of sum(a + b), which is equal up to rounding
// and the same for all strategies.
TEST(Awkward, RecomputedBlockUsedTwiceGivesEqualStrategies) {
  const TrainOptions plainly = options_for({.shared_block = true});
  const TrainOptions again = options_for({.shared_block = true, .recompute = true});
  for (int ranks : kRanks) {
    const Trained all_alike = train_on_threads({.ranks = ranks}, strategy_for(kOnePerPlacement[0]), again);
    const Trained wanted = train_on_threads({.ranks = ranks}, strategy_for(kOnePerPlacement[0]), plainly);
    for (const Placed& kind : kOnePerPlacement) {
      const std::string what = name_of(kind) + " on " + std::to_string(ranks) + " ranks";
      const Trained got = train_on_threads({.ranks = ranks}, strategy_for(kind), again);
      expect_same_bits(got, all_alike, what);
      EXPECT_LT(largest_difference(got, wanted), kTolerance) << what;
      if (ranks == 1) expect_same_bits(got, wanted, what);
    }
  }
}

// ---- units, prefetch, dtypes -------------------------------------------------------------------------------------

TEST(Awkward, AnyCutIntoUnitsGivesTheSameValues) {
  const auto units = [](std::vector<std::string> classes, std::vector<std::string> modules, std::int64_t min_numel) {
    UnitsConfig config;
    config.classes = std::move(classes);
    config.modules = std::move(modules);
    config.min_numel = min_numel;
    return config;
  };
  const auto classes = [&](std::vector<std::string> names) { return units(std::move(names), {}, 0); };
  const auto modules = [&](std::vector<std::string> paths) { return units({}, std::move(paths), 0); };
  const auto size = [&](std::int64_t min_numel) { return units({}, {}, min_numel); };
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
    expect_strategies_agree(name, options_for({}), [&units = units](Strategy& s) { s.units = units; });
  }
}

TEST(Awkward, UnknownUnitClassesAreNamed) {
  const auto make = [] {
    run_ranks({.ranks = 2}, [](const Mesh& mesh) {
      Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
      strategy.units.classes = {"Blok"};
      Engine(make_tiny({}, true), strategy, mesh);
    });
  };
  const std::string told = error_of(ExitCode::kConfig, make);
  EXPECT_THAT(told, HasSubstr("Blok"));
  EXPECT_THAT(told, HasSubstr("Block"));
}

TEST(Awkward, PrefetchChangesNoBits) {
  const TrainOptions options = options_for({.blocks = 4});
  constexpr std::int64_t kPrefetches[] = {0, 1, 2, 5};
  constexpr ShardingStrategy kKinds[] = {ShardingStrategy::kShardGradOp, ShardingStrategy::kFullShard};
  MadeOnce<Trained> unsharded;
  for (const auto& [on, prefetch, kind] : pairwise_of(std::array{2, 3}, kPrefetches, kKinds)) {
    const ThreadRanks ranks{.ranks = on};
    const Trained& wanted = unsharded(
        std::to_string(on), [&] { return train_on_threads(ranks, strategy_for(ShardingStrategy::kNoShard), options); });
    Strategy strategy = strategy_for(kind);
    strategy.prefetch = prefetch;
    const Trained got = train_on_threads(ranks, strategy, options);
    const std::string what = name_of(kind) + " on " + std::to_string(on) + " ranks";
    expect_same_bits(got, wanted, what + ", prefetch " + std::to_string(prefetch));
    EXPECT_EQ(got.traffic.prefetched_gathers > 0, prefetch > 0) << what;
  }
}

TEST(Awkward, LastMicrobatchSyncEqualsTheUnshardedRun) {
  expect_strategies_agree("last microbatch", options_for({}, 2), [](Strategy& s) {
    s.gradient_accumulation = 2;
    s.gradient_sync = GradientSync::kLastMicrobatch;
  });
}

TEST(Awkward, SixteenBitReductionsGiveEqualBitsUnderEveryStrategy) {
  constexpr GradientSync kSyncs[] = {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch};
  MadeOnce<Trained> unsharded;
  for (const auto& each : pairwise_of(kSyncs, kRanks, kOnePerPlacement)) {
    const GradientSync sync = std::get<0>(each);
    const int ranks = std::get<1>(each);
    const Placed& kind = std::get<2>(each);
    const auto train = [&](const Placed& placed) {
      Strategy strategy = strategy_for(placed, nullptr, DType::kBF16);
      strategy.mixed_precision.reduce = DType::kBF16;
      strategy.gradient_accumulation = 2;
      strategy.gradient_sync = sync;
      return train_on_threads({.ranks = ranks}, strategy, options_for({}, 2));
    };
    const std::string where = std::string(sync == GradientSync::kEachMicrobatch ? ", each" : ", the last") +
                              " microbatch, on " + std::to_string(ranks) + " ranks";
    const Trained& first = unsharded(where, [&] { return train(ShardingStrategy::kNoShard); });
    if (kind.kind != ShardingStrategy::kNoShard) expect_same_bits(train(kind), first, name_of(kind) + where);
  }
}

TEST(Awkward, DeferredAndEagerStartsTrainAlike) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Placed& kind : kOnePerPlacement) {
      TrainOptions options = options_for({.tied_head = true});
      const Trained deferred = train_on_threads({.ranks = 3}, strategy_for(kind, nullptr, dtype), options);
      options.deferred = false;
      const Trained eager = train_on_threads({.ranks = 3}, strategy_for(kind, nullptr, dtype), options);
      expect_same_bits(deferred, eager, name_of(kind));
    }
  }
}
// ---- mixed dtypes, skipped blocks --------------------------------------------------------------------------------

// A module with a Linear that is converted to bf16 between fp32 ones, and with a batch norm that stays fp32.
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

TEST(Awkward, MixedDtypesWithAnFp32BatchNormTrainAlike) {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    std::optional<Values> first;
    const auto batches = make_batches(4, 24, 5, 19);
    on_each_placement(
        3,
        [&](const Mesh& mesh, Strategy strategy) {
          strategy.units.classes = {"Linear"};
          Mixed model = make_mixed();
          Engine engine(model, strategy, mesh);
          EXPECT_EQ(model->norm->weight.scalar_type(), at::kFloat);  // by default, keep_fp32 keeps batch norms in fp32
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

/// Runs Tiny's forward without block `skip`.
at::Tensor forward_without(TinyImpl& model, std::int64_t skip, const at::Tensor& tokens, const at::Tensor& targets) {
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

}  // namespace awkward_test
}  // namespace tessera::testing
