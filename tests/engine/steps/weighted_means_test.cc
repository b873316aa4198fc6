// Tests weighted means. Training is that of plain LibTorch on the whole batch. This holds for every division of a
// batch's rows among ranks and microbatches, and whichever rank has no data left.

#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/step/agree/loss_seed.h"
#include "tessera/token_batches.h"
#include "tessera/uneven.h"
#include "tests/support/offloaded.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace weighted_means_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kRows = 24;
constexpr std::size_t kSteps = 4;
constexpr double kLr = 0.1, kMomentum = 0.9, kClipping = 0.5;

Adjust plain_sgd(std::int64_t accumulation, bool in_backward = false) {
  return [=](Strategy& s) {
    s.optimizer.type = OptimizerType::kSgd;
    s.optimizer.lr = kLr;
    s.optimizer.momentum = kMomentum;
    s.optimizer.weight_decay = 0;
    s.gradient_clipping = kClipping;
    s.gradient_accumulation = accumulation;
    if (in_backward) update_in_backward(s);
  };
}

struct Told {
  double loss = 0, norm = 0;
};
struct PlainRun {
  std::vector<Told> steps;
  Values values;
};

/// Trains with plain LibTorch, one step for each of these batches.
PlainRun train_plainly(const std::vector<Batch>& batches, bool clips = true) {
  Tiny model = make_tiny({}, false);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(kLr).momentum(kMomentum));
  PlainRun run;
  for (const Batch& batch : batches) {
    optimizer.zero_grad();
    const at::Tensor loss = model->forward(batch.tokens, batch.targets);
    loss.backward();
    const double most = clips ? kClipping : std::numeric_limits<double>::infinity();
    const double norm = torch::nn::utils::clip_grad_norm_(model->parameters(), most);
    optimizer.step();
    run.steps.push_back({loss.item<double>(), norm});
  }
  run.values = values_of(*model);
  return run;
}

std::vector<Batch> whole_batches() { return make_batches(kSteps, kRows, 5, TinyOptions().vocab); }

Batch rows_of(const Batch& batch, std::int64_t begin, std::int64_t end) {
  return {batch.tokens.narrow(0, begin, end - begin), batch.targets.narrow(0, begin, end - begin)};
}

/// Returns part `k` of a batch's rows. Parts have very different numbers of rows. If there are many parts, the first
/// part has no rows.
Batch piece_of(const Batch& batch, std::int64_t k, std::int64_t pieces) {
  const auto cut = [&](std::int64_t i) { return kRows * i * i / (pieces * pieces); };
  return rows_of(batch, cut(k), cut(k + 1));
}

at::Tensor loss_of(Session& session, const Batch& batch) {
  const c10::Device device = session.engine.device();
  return session.model->forward(batch.tokens.to(device), batch.targets.to(device));
}

/// Makes a backward with the number of rows as its weight. The loss of no rows is NaN.
void backward_of(Session& session, const Batch& batch) {
  const std::int64_t rows = batch.tokens.size(0);
  if (rows > 0) return session.engine.backward(loss_of(session, batch), {.weight = static_cast<double>(rows)});
  const at::Tensor loss = loss_of(session, rows_of(session.batches[0], 0, 1));
  session.engine.backward(loss * std::numeric_limits<float>::quiet_NaN(), {.weight = 0});
}

void expect_told(const StepResult& got, const Told& wanted, const std::string& what) {
  EXPECT_NEAR(got.loss, wanted.loss, 1e-6 * wanted.loss) << what << ", step " << got.step;
  EXPECT_NEAR(got.grad_norm, wanted.norm, 1e-5 * wanted.norm) << what << ", step " << got.step;
}

TEST(WeightedMeans, UnevenRowsTrainAsTheWholeBatch) {
  const std::vector<Batch> batches = whole_batches();
  const PlainRun clipped = train_plainly(batches), plain = train_plainly(batches, /*clips=*/false);
  struct How {
    std::int64_t accumulation;
    bool in_backward;
    GradientSync sync = GradientSync::kEachMicrobatch;
  };
  const How hows[] = {{1, false}, {2, false}, {3, false, GradientSync::kLastMicrobatch}, {1, true}};
  for (const auto& [placed, ranks, over_network, how] :
       pairwise_of(kOnePerPlacement, std::array{1, 2, 3}, std::array{false, true}, hows)) {
    const PlainRun& wanted = how.in_backward ? plain : clipped;
    Strategy strategy = strategy_for(placed, plain_sgd(how.accumulation, how.in_backward));
    strategy.gradient_sync = how.sync;
    const std::string what = name_of(placed) + ", " + std::to_string(ranks) + " ranks, " +
                             std::to_string(how.accumulation) + " microbatches" +
                             (how.in_backward ? ", in backward" : "") + (over_network ? ", over a network" : "");
    run_ranks({.ranks = ranks, .hosts = over_network ? ranks : 1}, [&, &how = how](const Mesh& mesh) {
      Session session(mesh, strategy);
      const std::int64_t pieces = mesh.world_size() * how.accumulation;
      for (std::size_t i = 0; i < kSteps; ++i) {
        for (std::int64_t m = 0; m < how.accumulation; ++m)
          backward_of(session, piece_of(batches[i], m * mesh.world_size() + mesh.rank(), pieces));
        expect_told(session.engine.step(), wanted.steps[i], what);
      }
      expect_close(session.values(), wanted.values, 1e-6, what);
    });
  }
}

TEST(WeightedMeans, UnevenRowsTrainAsTheWholeBatchWhereReplicasOrTiersTakePart) {
  const std::vector<Batch> batches = whole_batches();
  const PlainRun wanted = train_plainly(batches);
  struct Case {
    const char* what;
    ShardingStrategy kind;
    Adjust adjust;
    std::int64_t replicas_apart = 1;  ///< number of replicas that train by themselves, each with the same rows
  };
  const Case cases[] = {
      {"SHARD_OPTIMIZER", ShardingStrategy::kShardOptimizer, nullptr},
      {"HYBRID_SHARD", ShardingStrategy::kHybridShard,
       [](Strategy& s) {
         s.mesh = {2, 2};
       }},
      {"SHARD_GRADIENTS of two replicas", ShardingStrategy::kShardGradients,
       [](Strategy& s) {
         s.mesh = {2, 2};
       }},
      {"a second copy", ShardingStrategy::kFullShard, [](Strategy& s) { s.secondary.form = SecondaryForm::kPlain; }},
      {"states on disk", ShardingStrategy::kFullShard, [](Strategy& s) { put_below(s, kSomeBelow); }},
      {"lossless gradients", ShardingStrategy::kNoShard,
       [](Strategy& s) { s.compression.gradients = WireForm::kLossless; }},
      {"local_sgd", ShardingStrategy::kHybridShard,
       [](Strategy& s) {
         s.mesh = {2, 2};
         s.sync.type = SyncType::kLocalSgd;
         s.sync.every = 2;
       },
       2}};
  for (const auto& [each, accumulation] : pairwise_of(cases, std::array<std::int64_t, 2>{1, 2})) {
    Strategy strategy = strategy_for(each.kind, plain_sgd(accumulation));
    if (each.adjust) each.adjust(strategy);
    const std::string what = std::string(each.what) + ", " + std::to_string(accumulation) + " microbatches";
    run_ranks({.ranks = 4, .hosts = 2}, [&, &each = each, accumulation = accumulation](const Mesh& mesh) {
      Session session(mesh, strategy);
      const std::int64_t ranks = mesh.world_size() / each.replicas_apart, own = mesh.rank() % ranks;
      for (std::size_t i = 0; i < kSteps; ++i) {
        for (std::int64_t m = 0; m < accumulation; ++m)
          backward_of(session, piece_of(batches[i], m * ranks + own, ranks * accumulation));
        expect_told(session.engine.step(), wanted.steps[i], what);
      }
      expect_close(session.values(), wanted.values, 1e-6, what);
    });
  }
}

// The last rank runs out of data: it has no batch for the last microbatch of the second step, and none in later steps.
TEST(WeightedMeans, RankWithoutABatchTakesPartButDoesNotCount) {
  const std::vector<Batch> batches = whole_batches();
  const PlainRun clipped = train_plainly(batches), plain = train_plainly(batches, /*clips=*/false);
  struct How {
    std::int64_t accumulation;
    bool in_backward;
    GradientSync sync = GradientSync::kEachMicrobatch;
  };
  const How hows[] = {{1, false}, {2, false}, {2, false, GradientSync::kLastMicrobatch}, {1, true}};
  for (const auto& [placed, ranks, over_network, how] :
       pairwise_of(kOnePerPlacement, std::array{2, 3}, std::array{false, true}, hows)) {
    const PlainRun& wanted = how.in_backward ? plain : clipped;
    Strategy strategy = strategy_for(placed, plain_sgd(how.accumulation, how.in_backward));
    strategy.gradient_sync = how.sync;
    const std::string what = name_of(placed) + ", " + std::to_string(ranks) + " ranks, " +
                             std::to_string(how.accumulation) + " microbatches" +
                             (how.in_backward ? ", in backward" : "") + (over_network ? ", over a network" : "");
    const auto is_out = [ranks = ranks, &how = how](std::size_t step, std::int64_t m, int rank) {
      return rank == ranks - 1 && (step > 1 || (step == 1 && m == how.accumulation - 1));
    };
    run_ranks({.ranks = ranks, .hosts = over_network ? ranks : 1}, [&, &how = how, ranks = ranks](const Mesh& mesh) {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < kSteps; ++i) {
        std::int64_t pieces = 0, next = 0;
        for (std::int64_t m = 0; m < how.accumulation; ++m)
          for (int rank = 0; rank < ranks; ++rank) pieces += is_out(i, m, rank) ? 0 : 1;
        for (std::int64_t m = 0; m < how.accumulation; ++m) {
          for (int rank = 0; rank < ranks; ++rank) {
            const bool out = is_out(i, m, rank);
            if (rank == mesh.rank())
              out ? session.engine.backward_nothing() : backward_of(session, piece_of(batches[i], next, pieces));
            next += out ? 0 : 1;
          }
        }
        expect_told(session.engine.step(), wanted.steps[i], what);
      }
      expect_close(session.values(), wanted.values, 1e-6, what);
    });
  }
}

// Each rank has begun a different number of the four microbatches, and some ranks have begun all four.
TEST(WeightedMeans, PartialStepIsTheMeanOverItsMicrobatches) {
  const std::vector<Batch> batches = whole_batches();
  const PlainRun wanted = train_plainly(batches);
  for (const auto& [placed, ranks, sync] :
       pairwise_of(kOnePerPlacement, std::array{1, 2, 3},
                   std::array{GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch})) {
    Strategy strategy = strategy_for(placed, plain_sgd(4));
    strategy.gradient_sync = sync;
    const std::string what = name_of(placed) + ", " + std::to_string(ranks) + " ranks";
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < kSteps; ++i) {
        std::int64_t pieces = 0, before = 0;
        const auto count = [&](int rank) {
          return static_cast<std::int64_t>(4 - (i + static_cast<std::size_t>(rank)) % 4);
        };
        for (int rank = 0; rank < mesh.world_size(); ++rank) {
          if (rank == mesh.rank()) before = pieces;
          pieces += count(rank);
        }
        for (std::int64_t m = 0; m < count(mesh.rank()); ++m)
          backward_of(session, piece_of(batches[i], before + m, pieces));
        expect_told(session.engine.step(/*partial=*/true), wanted.steps[i], what);
      }
      expect_close(session.values(), wanted.values, 1e-6, what);
    });
  }
}

/// The number of batches that each of three ranks has in an epoch. Some ranks have none from the first step on.
using Lengths = std::array<std::int64_t, 3>;
constexpr Lengths kLengths[] = {{5, 3, 1}, {0, 5, 2}, {4, 0, 0}, {0, 0, 3}};

// Rank r has batches of r + 1 rows in each of two epochs, and two microbatches make a step.
TEST(WeightedMeans, LoadersOfDifferentLengthsTrainAsOneLoader) {
  const std::vector<Batch> rows = make_batches(5, 6, 5, TinyOptions().vocab);
  const auto batch_of = [&](std::int64_t place, int rank) {
    return rows_of(rows[static_cast<std::size_t>(place)], rank * (rank + 1) / 2, (rank + 1) * (rank + 2) / 2);
  };
  for (const auto& [placed, ranks, over_network, lengths] :
       pairwise_of(kOnePerPlacement, std::array{2, 3, 1}, std::array{false, true}, kLengths)) {
    const auto length = [&lengths = lengths](int rank) { return lengths[static_cast<std::size_t>(rank)]; };
    std::vector<Batch> whole;  // [step]: its whole batch
    for (std::int64_t window = 0; window < 3; ++window) {
      std::vector<at::Tensor> tokens, targets;
      for (std::int64_t place = 2 * window; place < std::min<std::int64_t>(5, 2 * window + 2); ++place) {
        for (int rank = 0; rank < ranks; ++rank) {
          if (place >= length(rank)) continue;
          tokens.push_back(batch_of(place, rank).tokens);
          targets.push_back(batch_of(place, rank).targets);
        }
      }
      if (!tokens.empty()) whole.push_back({at::cat(tokens), at::cat(targets)});
    }
    const std::size_t of_epoch = whole.size();
    for (std::size_t i = 0; i < of_epoch; ++i) whole.push_back(whole[i]);
    const PlainRun wanted = train_plainly(whole);
    const Strategy strategy = strategy_for(placed, plain_sgd(2));
    const std::string what =
        name_of(placed) + ", " + std::to_string(ranks) + " ranks, rank 0 has " + std::to_string(length(0)) + " batches";
    run_ranks({.ranks = ranks, .hosts = over_network ? ranks : 1}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      std::vector<Batch> own;
      for (std::int64_t place = 0; place < length(mesh.rank()); ++place) own.push_back(batch_of(place, mesh.rank()));
      std::size_t steps = 0, batches = 0;
      const auto after_step = [&](const StepResult& result) { expect_told(result, wanted.steps[steps++], what); };
      for (int epoch = 0; epoch < 2; ++epoch) {
        for (const Batch& batch : uneven(own, session.engine, after_step)) {
          ++batches;
          backward_of(session, batch);
          if (session.engine.step_is_due()) after_step(session.engine.step());
        }
      }
      EXPECT_EQ(steps, wanted.steps.size()) << what;
      EXPECT_EQ(batches, 2 * own.size()) << what;
      expect_close(session.values(), wanted.values, 1e-6, what);
    });
  }
}

TEST(WeightedMeans, EqualWeightsHaveTheBitsOfNoWeights) {
  const auto trained_with = [](const Strategy& strategy, std::optional<double> weight) {
    return of_rank_zero({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy);
      for (std::size_t i = 0; i < 3 * session.microbatches; ++i) {
        weight ? session.engine.backward(session.loss(i), {.weight = *weight})
               : session.engine.backward(session.loss(i));
        if (session.engine.step_is_due()) session.engine.step();
      }
      return session.values();
    });
  };
  for (const auto& [placed, dtype, accumulation] :
       pairwise_of(kInMemory, std::array{DType::kF32, DType::kBF16, DType::kF16},
                   std::array{std::int64_t{1}, std::int64_t{3}})) {
    Strategy strategy = strategy_for(placed, nullptr, dtype);
    strategy.gradient_accumulation = accumulation;
    const Values without = trained_with(strategy, std::nullopt);
    EXPECT_TRUE(all_same_bits(trained_with(strategy, 1.0), without)) << name_of(placed);
    EXPECT_TRUE(dtype == DType::kF16 || all_same_bits(trained_with(strategy, 4.0), without)) << name_of(placed);
    expect_close(trained_with(strategy, 0.75), without, dtype == DType::kF32 ? 1e-3 : 6e-2, name_of(placed));
  }
}

// The factor contains the part of a weight that bf16 and fp16 cannot represent, so no weight is rounded.
TEST(WeightedMeans, SeedTimesFactorIsTheExactWeight) {
  for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
    for (const double weight : {0.5, 1.0, 3.0, 257.0, 100003.0}) {
      LossSeed start{at::full({}, 1024.0, dtype), {}};
      weigh(start, weight);
      const double factor = start.factor.defined() ? start.factor.item<double>() : 1.0;
      EXPECT_EQ(start.seed.item<double>() * factor, 1024.0 * weight) << dtype;
      EXPECT_FALSE(dtype == at::kFloat && start.factor.defined()) << "gradients would be passed over once more";
    }
  }
}

TEST(WeightedMeans, StepOfWeightZeroChangesNothing) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, plain_sgd(1)));
    session.train(0);
    const Values before = session.values();
    session.engine.backward(session.loss(1), {.weight = 0});
    const StepResult result = session.engine.step();
    EXPECT_TRUE(std::isnan(result.loss));
    EXPECT_EQ(result.grad_norm, 0);
    EXPECT_FALSE(result.overflow);
    EXPECT_TRUE(all_same_bits(session.values(), before));
    session.train(2);
    EXPECT_FALSE(all_same_bits(session.values(), before)) << "and the next one trains";
  });
}

TEST(WeightedMeans, WrongWeightsAndCallsAreRefusedByName) {
  run_ranks({.ranks = 2, .hosts = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, plain_sgd(2)));
    Engine& engine = session.engine;
    EXPECT_THAT(usage_error_of([&] { engine.backward_nothing(); }),
                AllOf(HasSubstr("first microbatch"), HasSubstr("uneven"), HasSubstr("weight 0")));
    const at::Tensor loss = session.loss(0);
    for (const double weight : {-1.0, std::nan(""), HUGE_VAL})
      EXPECT_THAT(usage_error_of([&] { engine.backward(loss, {.weight = weight}); }), HasSubstr("not negative"));
    engine.backward(loss, {.retain_graph = true, .weight = 2});
    EXPECT_THAT(usage_error_of([&] { engine.backward(loss, {.weight = 3}); }),
                AllOf(HasSubstr("weight 3"), HasSubstr("weight 2"), HasSubstr("one weight")));
    EXPECT_THAT(usage_error_of([&] { engine.backward_nothing(); }), HasSubstr("retain_graph"));
    engine.backward(loss, {.weight = 2});
    EXPECT_THAT(usage_error_of([&] { engine.step(); }),
                AllOf(HasSubstr("wants 2 microbatches"), HasSubstr("partial"), HasSubstr("zero_grad")));
    engine.step(/*partial=*/true);
    EXPECT_THAT(usage_error_of([&] { engine.step(/*partial=*/true); }), HasSubstr("backward_nothing"));
  });
}

// A microbatch of two losses makes two rounds of reductions, so a rank without a batch must make two rounds, too.
TEST(WeightedMeans, RankWithoutABatchFollowsSeveralLosses) {
  run_ranks({.ranks = 2, .hosts = 2}, [](const Mesh& mesh) {
    Session session(mesh, strategy_for(ShardingStrategy::kFullShard, plain_sgd(1)));
    for (std::size_t i = 0; i < 3; ++i) {
      if (i > 0 && mesh.rank() == 1) {
        session.engine.backward_nothing();
      } else {
        const at::Tensor loss = session.loss(i);
        session.engine.backward(loss * 0.25, {.retain_graph = true, .weight = 5});
        session.engine.backward(loss * 0.75, {.weight = 5});
      }
      EXPECT_TRUE(std::isfinite(session.engine.step().loss));
    }
  });
}

// There are 11 samples, and each rank takes 4 in a step. The last step is short, and one of two ranks has no samples
// in it.
TEST(WeightedMeans, ShortLastStepCountsEachTokenOnceOnAnyRanks) {
  const TestFolder folder;
  const std::string file = (folder / "text").string();
  std::string text;
  for (int i = 0; i < 11 * 5 + 1; ++i) text.push_back(static_cast<char>(i * i * 7 % 19));
  std::ofstream(file, std::ios::binary) << text;
  const auto batches_on = [&](int rank, int ranks) {
    return TokenBatches(file, 5, 19,
                        {.batch = 4, .rank = rank, .world_size = ranks, .shuffle = false, .tail = Tail::kPad});
  };
  TokenBatches one = TokenBatches(file, 5, 19, {.batch = 11, .shuffle = false});
  const TokenBatch all = one.next();
  const double wanted = make_tiny({}, false)->forward(all.input, all.target).item<double>();
  for (const int ranks : {1, 2, 3}) {
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, plain_sgd(1)));
      TokenBatches batches = batches_on(mesh.rank(), ranks);
      std::vector<std::int64_t> steps(static_cast<std::size_t>(batches.steps_per_epoch()));
      const auto found = session.engine.evaluate(steps, [&](std::int64_t) {
        const TokenBatch batch = batches.next();
        return std::pair(session.model->forward(batch.input, batch.target), batch.weight);
      });
      EXPECT_NEAR(found.loss, wanted, 1e-6 * wanted) << ranks;
      EXPECT_EQ(found.weight, 11.0 / 4) << ranks;
      batches = batches_on(mesh.rank(), ranks);
      std::vector<Batch> of_step;  // plain LibTorch takes a step's samples at once
      for (std::int64_t first = 0; first < 11; first += 4 * ranks) {
        const std::int64_t end = std::min<std::int64_t>(11, first + 4 * ranks);
        of_step.push_back({all.input.narrow(0, first, end - first), all.target.narrow(0, first, end - first)});
      }
      const PlainRun plain = train_plainly(of_step);
      for (const Told& told : plain.steps) {
        const TokenBatch batch = batches.next();
        session.engine.backward(session.model->forward(batch.input, batch.target), {.weight = batch.weight});
        expect_told(session.engine.step(), told, std::to_string(ranks) + " ranks");
      }
      expect_close(session.values(), plain.values, 1e-6, std::to_string(ranks) + " ranks");
    });
  }
}

TEST(WeightedMeans, LossWithAFactorOfItsOwnGivesAWarning) {
  const auto warned = [](const std::function<at::Tensor(const at::Tensor&)>& change, std::int64_t accumulation) {
    return stderr_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Session session(mesh, strategy_for(ShardingStrategy::kNoShard, plain_sgd(accumulation)));
        for (std::int64_t i = 0; i < accumulation; ++i) session.engine.backward(change(session.loss(0)));
        session.engine.step();
      });
    });
  };
  const auto is_told = AllOf(HasSubstr("divided by 4"), HasSubstr("leave the division out"));
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss / 4; }, 4), is_told);
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss * 0.25; }, 4), is_told);
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss / 4; }, 2), ::testing::Not(HasSubstr("divided")));
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss / 4; }, 1), ::testing::Not(HasSubstr("divided")));
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss; }, 4), ::testing::Not(HasSubstr("divided")));
  const auto is_scaled = AllOf(HasSubstr("multiplied by 65536"), HasSubstr("leave the scaler out"));
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss * 65536; }, 1), is_scaled);
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss * at::full({}, 65536.0F); }, 4), is_scaled);
  EXPECT_THAT(warned([](const at::Tensor& loss) { return loss * 3000; }, 1), ::testing::Not(HasSubstr("multiplied")));
}

}  // namespace weighted_means_test
}  // namespace tessera::testing
