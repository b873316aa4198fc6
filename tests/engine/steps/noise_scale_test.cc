// Tests the gradient noise scale that steps measure. It is compared with the same formula over each rank's gradients in
// plain LibTorch, and with the exact value of a model whose noise is known. Training must be the same with and without
// this measurement.

#include "optim/noise_scale.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/checkpoint.h"
#include "tessera/durable.h"
#include "tessera/error.h"
#include "tests/support/pairwise.h"
#include "tests/support/session.h"
#include "tests/support/stand_ins/counted_collectives.h"
#include "tests/support/stderr_of.h"
#include "tests/support/test_folder.h"

namespace tessera::testing {
namespace noise_scale_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kSteps = 3, kMostRows = 5;

/// Measures the noise scale of each step by itself, and does not change the parameters.
Adjust measures(std::int64_t accumulation = 1, GradientSync sync = GradientSync::kEachMicrobatch) {
  return [=](Strategy& s) {
    s.optimizer.type = OptimizerType::kSgd;
    s.optimizer.lr = 0;
    s.optimizer.weight_decay = 0;
    s.gradient_accumulation = accumulation;
    s.gradient_sync = sync;
    s.noise_scale = {.every = 1, .smoothing = 0};
  };
}

/// The microbatches of all ranks and steps. Each has another number of rows, which is its weight.
struct Pieces {
  int ranks;
  std::int64_t accumulation;

  std::int64_t index(std::int64_t step, int rank, std::int64_t round) const {
    return (step * accumulation + round) * ranks + rank;
  }
  static std::int64_t rows(std::int64_t index) { return 1 + index * index % kMostRows; }
  static Batch of(std::int64_t index) {
    static const std::vector<Batch> all = make_batches(3 * 3 * kSteps, kMostRows, 5, TinyOptions().vocab);
    const Batch& batch = all.at(static_cast<std::size_t>(index));
    return {batch.tokens.narrow(0, 0, rows(index)), batch.targets.narrow(0, 0, rows(index))};
  }
};

/// Returns a microbatch's gradient times its weight. The gradients of all parameters are one vector in fp64, computed
/// in plain LibTorch.
at::Tensor weighted_gradient(std::int64_t index) {
  static std::map<std::int64_t, at::Tensor> known;
  at::Tensor& gradient = known[index];
  if (gradient.defined()) return gradient;
  Tiny model = make_tiny({}, false);
  const Batch batch = Pieces::of(index);
  model->forward(batch.tokens, batch.targets).backward();
  std::vector<at::Tensor> parts;
  for (const at::Tensor& parameter : model->parameters()) parts.push_back(parameter.grad().flatten().to(at::kDouble));
  return gradient = at::cat(parts) * static_cast<double>(Pieces::rows(index));
}

double square_of(const at::Tensor& gradient) { return gradient.square().sum().item<double>(); }

/// Returns the values that a step should measure. `adds`: ranks add up their microbatches before they reduce.
NoiseStep plain_step(const Pieces& pieces, std::int64_t step, bool adds) {
  NoiseStep wanted;
  at::Tensor all = at::zeros_like(weighted_gradient(0));
  for (int rank = 0; rank < pieces.ranks; ++rank) {
    at::Tensor own = at::zeros_like(all);
    double weight = 0;
    for (std::int64_t round = 0; round < pieces.accumulation; ++round) {
      const std::int64_t index = pieces.index(step, rank, round);
      const at::Tensor gradient = weighted_gradient(index);
      const auto rows = static_cast<double>(Pieces::rows(index));
      own += gradient;
      weight += rows;
      if (!adds) wanted.own.add(square_of(gradient), rows);
      if (adds && (pieces.ranks == 1 || round + 1 == pieces.accumulation)) wanted.own.add(square_of(own), weight);
    }
    all += own;
    wanted.weight += weight;
  }
  wanted.square = square_of(all);
  wanted.batch = wanted.weight;
  return wanted;
}

void expect_measured(const StepResult& got, const NoiseStep& wanted, double tolerance, const std::string& what) {
  NoiseState state;
  ASSERT_TRUE(add_noise(/*smoothing=*/0, wanted, state));
  const NoiseScale noise(state);
  const double norm = wanted.own.squares / wanted.own.weight_squares;  // estimates subtract numbers of this size
  EXPECT_NEAR(got.noise_square, noise.square(), tolerance * norm) << what;
  EXPECT_NEAR(got.noise_variance, noise.variance(), tolerance * norm * wanted.batch) << what;
  EXPECT_EQ(got.noise_batch, wanted.batch) << what;
  const bool is_known = got.noise_square > 0 && got.noise_variance > 0;
  EXPECT_EQ(got.noise_scale, is_known ? got.noise_variance / got.noise_square : 0) << what;
}

struct How {
  std::int64_t accumulation;
  GradientSync sync = GradientSync::kEachMicrobatch;
  bool in_backward = false;
};

void train_and_compare(const Mesh& mesh, const Strategy& strategy, double tolerance, const std::string& what) {
  const Pieces pieces{mesh.world_size(), strategy.gradient_accumulation};
  const bool last = strategy.gradient_sync == GradientSync::kLastMicrobatch && strategy.gradient_accumulation > 1;
  Session session(mesh, strategy);
  for (std::int64_t step = 0; step < kSteps; ++step) {
    for (std::int64_t round = 0; round < pieces.accumulation; ++round) {
      const std::int64_t index = pieces.index(step, mesh.rank(), round), rows = Pieces::rows(index);
      const Batch batch = Pieces::of(index);
      session.engine.backward(session.model->forward(batch.tokens, batch.targets),
                              {.samples = rows, .weight = static_cast<double>(rows)});
    }
    const StepResult result = session.engine.step();
    EXPECT_EQ(result.allocated, result.planned) << what;
    if (mesh.rank() > 0) continue;
    expect_measured(result, plain_step(pieces, step, last || pieces.ranks == 1), tolerance, what);
  }
}

TEST(NoiseScaleOfSteps, EqualsTheFormulaOverGradientsInPlainLibTorch) {
  const How hows[] = {
      {1}, {2}, {3, GradientSync::kLastMicrobatch}, {2, GradientSync::kLastMicrobatch}, {1, {}, /*in_backward=*/true}};
  for (const auto& [placed, ranks, how] : pairwise_of(kOnePerPlacement, std::array{1, 2, 3}, hows)) {
    if (ranks * how.accumulation == 1) continue;
    Strategy strategy = strategy_for(placed, measures(how.accumulation, how.sync));
    if (how.in_backward) update_in_backward(strategy);
    const std::string what =
        name_of(placed) + ", ranks: " + std::to_string(ranks) + ", microbatches: " + std::to_string(how.accumulation) +
        (how.sync == GradientSync::kLastMicrobatch ? ", last" : "") + (how.in_backward ? ", in backward" : "");
    run_ranks({.ranks = ranks}, [&](const Mesh& mesh) { train_and_compare(mesh, strategy, 1e-4, what); });
  }
}

TEST(NoiseScaleOfSteps, NarrowParametersAndGradientsAndTwoAxesMeasureTheSame) {
  const auto narrow = [](Strategy& s) { s.mixed_precision.reduce = DType::kBF16; };
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool reduces_narrow : {false, true}) {
      Strategy strategy = strategy_for(ShardingStrategy::kHybridShard, measures(2), dtype);
      strategy.mesh.replicate = 2;
      if (reduces_narrow && dtype != DType::kF16) narrow(strategy);
      run_ranks({.ranks = 4},
                [&](const Mesh& mesh) { train_and_compare(mesh, strategy, 0.03, std::string(name_of(dtype))); });
    }
  }
}

/// The loss of a sample x is half of the squared distance between the parameters and x, so its gradient is the
/// parameters minus x.
struct QuadraticImpl : torch::nn::Module {
  QuadraticImpl() {
    a = register_parameter("a", at::zeros({5, 2}));
    b = register_parameter("b", at::zeros({6}));
  }
  at::Tensor forward(const at::Tensor& x) const {
    return (at::cat({a.reshape({-1}), b}) - x).square().sum(1).mean() * 0.5;
  }
  at::Tensor a, b;
};
TORCH_MODULE(Quadratic);

constexpr std::int64_t kDraws = 10000, kWidth = 16, kRows = 4;
constexpr double kMean = 0.5, kDeviation = 1.5;
/// The values of |G|^2 and tr(Sigma) if all parameters are 0.
constexpr double kExactSquare = kWidth * kMean * kMean, kExactVariance = kWidth * kDeviation * kDeviation;

struct Estimate {
  double mean = 0, error = 0;  ///< the standard error of the mean
};

Estimate estimate_of(const std::vector<double>& draws) {
  Estimate found;
  for (const double each : draws) found.mean += each / static_cast<double>(draws.size());
  double sum = 0;
  for (const double each : draws) sum += (each - found.mean) * (each - found.mean);
  const auto count = static_cast<double>(draws.size());
  found.error = std::sqrt(sum / (count * (count - 1)));
  return found;
}

/// Makes steps with new samples in each, while the parameters do not change. `after` sees each result of rank 0.
void draw(const Strategy& strategy, const std::function<void(const StepResult&)>& after) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Quadratic model;
    Engine engine(model, strategy, mesh);
    const at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(7 + mesh.rank()));
    for (std::int64_t i = 0; i < kDraws; ++i) {
      const at::Tensor x = at::randn({kRows, kWidth}, generator) * kDeviation + kMean;
      engine.backward(model->forward(x), {.samples = kRows});
      const StepResult result = engine.step();
      if (mesh.rank() == 0) after(result);
    }
  });
}

Strategy strategy_of_draws(ShardingStrategy placed, double smoothing) {
  Strategy strategy;
  measures()(strategy);
  strategy.strategy = placed;
  strategy.gradient_clipping = 1;
  strategy.noise_scale.smoothing = smoothing;
  return strategy;
}

TEST(NoiseScaleOfSteps, TenThousandDrawsOfKnownNoiseGiveTheExactValue) {
  std::vector<double> squares, variances;
  draw(strategy_of_draws(ShardingStrategy::kFullShard, 0), [&](const StepResult& result) {
    squares.push_back(result.noise_square);
    variances.push_back(result.noise_variance);
  });
  const Estimate square = estimate_of(squares), variance = estimate_of(variances);
  const double scale = variance.mean / square.mean, exact = kExactVariance / kExactSquare;
  const double error = scale * std::hypot(square.error / square.mean, variance.error / variance.mean);
  std::printf("noise scale %.4f, standard error %.4f, exactly %.4f\n", scale, error, exact);
  EXPECT_NEAR(square.mean, kExactSquare, 4 * square.error) << "no bias";
  EXPECT_NEAR(variance.mean, kExactVariance, 4 * variance.error) << "no bias";
  EXPECT_NEAR(scale, exact, 0.05 * exact);
  EXPECT_LT(error, 0.0125 * exact) << "5 % are four standard errors";
}

TEST(NoiseScaleOfSteps, SmoothedScaleOfTenThousandDrawsIsTheExactValue) {
  StepResult last;
  draw(strategy_of_draws(ShardingStrategy::kNoShard, 0.9999), [&](const StepResult& result) { last = result; });
  const double exact = kExactVariance / kExactSquare;
  EXPECT_NEAR(last.noise_scale, exact, 0.05 * exact);
  EXPECT_EQ(last.noise_batch, 2 * kRows);
}

struct CountedRun {
  CallsOfGroups calls;  ///< the calls of rank 0, only those in steps
  Values values;
  std::vector<StepResult> steps;
};

CountedRun counted_run(const Strategy& strategy) {
  std::mutex mutex;
  std::vector<std::unique_ptr<CallsOfGroups>> counts;
  thread_local CallsOfGroups* own = nullptr;
  const auto wrap = [&](std::shared_ptr<GroupFactory> factory) -> std::shared_ptr<GroupFactory> {
    const std::lock_guard lock(mutex);
    own = counts.emplace_back(std::make_unique<CallsOfGroups>()).get();
    return wrapped_groups(std::move(factory), [counted = own](const std::string& use, auto group) {
      return std::make_shared<CountedCollectives>(std::move(group), (*counted)[use]);
    });
  };
  CountedRun run;
  run_ranks({.ranks = 2, .wrap_groups = wrap}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    const CallsOfGroups before = *own;
    std::vector<StepResult> steps;
    for (std::size_t i = 0; i < 6; ++i) steps.push_back(session.train(i));
    CallsOfGroups calls = *own;
    for (auto& [name, each] : calls) {
      if (!before.contains(name)) continue;
      each.calls -= before.at(name).calls;
      each.bytes -= before.at(name).bytes;
    }
    const Values values = session.values();
    if (mesh.rank() == 0) run = {calls, values, steps};
  });
  return run;
}

TEST(NoiseScaleOfSteps, TrainingHasTheSameBitsCallsAndPlan) {
  for (const GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    for (const ShardingStrategy kind : {ShardingStrategy::kNoShard, ShardingStrategy::kFullShard}) {
      Strategy plain = strategy_for(kind);
      plain.gradient_accumulation = 2;
      plain.gradient_sync = sync;
      Strategy measured = plain;
      measured.noise_scale.every = 2;
      const CountedRun with = counted_run(measured), without = counted_run(plain);
      EXPECT_TRUE(all_same_bits(with.values, without.values));
      for (std::size_t i = 0; i < with.steps.size(); ++i) {
        EXPECT_EQ(with.steps[i].loss, without.steps[i].loss);
        EXPECT_EQ(with.steps[i].grad_norm, without.steps[i].grad_norm);
        EXPECT_EQ(with.steps[i].planned, without.steps[i].planned);
        EXPECT_EQ(with.steps[i].allocated, without.steps[i].allocated);
        EXPECT_EQ(without.steps[i].noise_batch, 0);
      }
      ASSERT_EQ(with.calls.size(), without.calls.size());
      for (auto [name, calls] : without.calls) {
        if (name == "world") calls.bytes += 6 * 24;  // the step's agreement has more bytes
        EXPECT_EQ(with.calls.at(name), calls) << name;
      }
    }
  }
}

TEST(NoiseScaleOfSteps, ResultStaysUntilTheNextMeasurement) {
  Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  strategy.noise_scale.every = 3;
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    std::vector<StepResult> steps;
    for (std::size_t i = 0; i < 8; ++i) steps.push_back(session.train(i));
    for (const std::size_t i : {0u, 1u}) {
      EXPECT_EQ(steps[i].noise_batch, 0) << i;
      EXPECT_EQ(steps[i].noise_scale, 0) << i;
      EXPECT_EQ(steps[i].noise_variance, 0) << i;
    }
    EXPECT_EQ(steps[2].noise_batch, 2) << "microbatches, where no samples were told";
    EXPECT_NE(steps[2].noise_variance, 0);
    for (const std::size_t i : {3u, 4u, 6u, 7u}) EXPECT_EQ(steps[i].noise_variance, steps[i - 1].noise_variance) << i;
    EXPECT_NE(steps[5].noise_variance, steps[4].noise_variance);
  });
}

/// Makes a step in which the last rank's loss is `height` times its batch's loss.
StepResult train_at(Session& session, std::size_t i, double height) {
  const bool is_last = session.mesh.rank() == session.mesh.world_size() - 1;
  session.engine.backward(session.loss(i) * (is_last ? height : 1.0));
  return session.engine.step();
}

TEST(NoiseScaleOfSteps, SkippedStepMeasuresNothing) {
  Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  strategy.noise_scale.every = 1;
  strategy.on_spike = {.action = SpikeAction::kSkip, .factor = 3, .window = 2};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    train_at(session, 0, 1);
    const StepResult before = train_at(session, 1, 1);
    const StepResult spike = train_at(session, 2, 40);
    EXPECT_TRUE(spike.spike);
    EXPECT_EQ(spike.noise_variance, before.noise_variance);
    const StepResult overflow = train_at(session, 3, INFINITY);
    EXPECT_TRUE(overflow.overflow);
    EXPECT_EQ(overflow.noise_variance, before.noise_variance);
    EXPECT_NE(train_at(session, 4, 1).noise_variance, before.noise_variance);
  });
}

/// Microbatches that a program drops, and a rank without a batch, have no effect on the measurement.
TEST(NoiseScaleOfSteps, DroppedAndMissingMicrobatchesCountNothing) {
  for (const GradientSync sync : {GradientSync::kEachMicrobatch, GradientSync::kLastMicrobatch}) {
    const Strategy strategy = strategy_for(ShardingStrategy::kShardGradOp, measures(2, sync));
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      Session session(mesh, strategy), other(mesh, strategy);
      session.engine.backward(session.loss(0) * 3);
      session.engine.zero_grad();
      const StepResult dropped = session.train(1), plain = other.train(1);
      EXPECT_EQ(dropped.noise_variance, plain.noise_variance);
      EXPECT_EQ(dropped.noise_square, plain.noise_square);
      for (Session* each : {&session, &other}) each->engine.backward(each->loss(2));
      if (mesh.rank() == 0) {
        session.engine.backward(session.loss(3));
        other.engine.backward(other.loss(3));
      } else {
        session.engine.backward_nothing();
        other.engine.backward(other.loss(3) * NAN, {.weight = 0});
      }
      const StepResult missing = session.engine.step(), weightless = other.engine.step();
      EXPECT_NE(missing.noise_variance, plain.noise_variance);
      EXPECT_EQ(missing.noise_variance, weightless.noise_variance);
    });
  }
}

TEST(NoiseScaleOfSteps, UnitThatIsReducedTwiceIsNotMeasuredAndSaidSo) {
  const std::string log = stderr_of([] {
    run_ranks({.ranks = 2}, [](const Mesh& mesh) {
      Session session(mesh, strategy_for(ShardingStrategy::kFullShard, measures()));
      session.engine.backward(session.loss(0), {.retain_graph = true});
      session.engine.backward(session.loss(1));
      EXPECT_EQ(session.engine.step().noise_batch, 0);
      EXPECT_GT(session.train(2).noise_batch, 0);
    });
  });
  EXPECT_THAT(log, AllOf(HasSubstr("\"noise_scale\" cannot measure this step"), HasSubstr("hint: ")));
}

TEST(NoiseScaleOfSteps, OneRankWithOneMicrobatchIsRefused) {
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    EXPECT_THAT(error_of(ExitCode::kConfig,
                         [&] { const Session session(mesh, strategy_for(ShardingStrategy::kFullShard, measures())); }),
                AllOf(HasSubstr("/noise_scale/every"), HasSubstr("one rank"), HasSubstr("hint:")));
  });
}

TEST(NoiseScaleOfSteps, ReplicasThatTrainApartMeasureTheirOwn) {
  Strategy strategy = strategy_for(ShardingStrategy::kHybridShard, measures());
  strategy.mesh.replicate = 2;
  strategy.sync.type = SyncType::kLocalSgd;
  strategy.sync.every = 3;
  run_ranks({.ranks = 4}, [&](const Mesh& mesh) {
    Session session(mesh, strategy);
    for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(session.train(i).noise_batch, 2) << i;
  });
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    EXPECT_THAT(error_of([&] { const Session session(mesh, strategy); }),
                AllOf(HasSubstr("one rank with one microbatch"), HasSubstr("a replica's ranks count")));
  });
}

/// A run that continues from a checkpoint, or from a commit, reports the same bits as a run without a break.
TEST(NoiseScaleOfSteps, ResumedRunKnowsWhatWasMeasured) {
  constexpr std::size_t kBreak = 4, kEnd = 7;
  const TestFolder folder;
  Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
  strategy.noise_scale.every = 2;
  Strategy durable = strategy;
  durable.durable = {.every = kBreak, .dir = (folder / "durable").string()};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    std::vector<StepResult> whole;
    {
      Session session(mesh, strategy), committed(mesh, durable);
      for (std::size_t i = 0; i < kEnd; ++i) {
        whole.push_back(session.train(i));
        if (i < kBreak) {
          committed.train(i);
          commit_durable(committed.engine);
        }
        if (i + 1 == kBreak) save_checkpoint(session.engine, folder / "c");
      }
    }
    Session loaded(mesh, strategy), resumed(mesh, durable);
    load_checkpoint(loaded.engine, folder / "c");
    ASSERT_TRUE(resume_durable(resumed.engine).has_value());
    for (std::size_t i = kBreak; i < kEnd; ++i) {
      EXPECT_EQ(loaded.train(i).noise_variance, whole[i].noise_variance) << i;
      const StepResult result = resumed.train(i);
      EXPECT_EQ(result.noise_variance, whole[i].noise_variance) << i;
      EXPECT_EQ(result.noise_square, whole[i].noise_square) << i;
      EXPECT_EQ(result.noise_batch, whole[i].noise_batch) << i;
    }
  });
}

TEST(NoiseScaleOfSteps, RunThatDoesNotMeasureTellsNothingOfItsCheckpoints) {
  const TestFolder folder;
  const Strategy measured = strategy_for(ShardingStrategy::kFullShard, measures());
  Strategy plain = measured;
  plain.noise_scale = {};
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    {
      Session session(mesh, measured);
      EXPECT_GT(session.train(0).noise_batch, 0);
      save_checkpoint(session.engine, folder.path());
    }
    Session session(mesh, plain);
    load_checkpoint(session.engine, folder.path());
    const StepResult result = session.train(1);
    EXPECT_EQ(result.noise_batch, 0);
    EXPECT_EQ(result.noise_variance, 0);
  });
}

}  // namespace noise_scale_test
}  // namespace tessera::testing
