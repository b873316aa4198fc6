// Compares batch norm over the samples of all ranks with plain LibTorch in one process, which has the concatenated
// batch.

#include "tessera/sync_batch_norm.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <gmock/gmock.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <mutex>

#include "tessera/error.h"
#include "tessera/recompute.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::BatchNormOptions;

constexpr std::int64_t kChannels = 5;

/// Returns the sizes of an input of `rows` rows and `dim` dimensions.
std::vector<std::int64_t> sizes_of(std::int64_t rows, std::int64_t dim) {
  std::vector<std::int64_t> sizes = {rows, kChannels, 4, 3, 2};
  sizes.resize(static_cast<std::size_t>(dim));
  return sizes;
}

/// The batch of all ranks together in each step, and the number of rows of each rank.
struct Problem {
  std::int64_t dim = 2;
  at::ScalarType type = at::kDouble;
  BatchNormOptions options{kChannels};
  std::vector<std::int64_t> rows;  ///< one for each rank
};

std::int64_t rows_before(const Problem& problem, int rank) {
  std::int64_t rows = 0;
  for (int q = 0; q < rank; ++q) rows += problem.rows[static_cast<std::size_t>(q)];
  return rows;
}

at::Tensor batch_of(const Problem& problem, int step) {
  const std::int64_t rows = rows_before(problem, static_cast<int>(problem.rows.size()));
  const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7 + step);  // a generator for this step
  return (at::randn(sizes_of(rows, problem.dim), generator, at::kDouble) * 3 + 2).to(problem.type);
}

/// The results of three steps.
struct Left {
  std::vector<at::Tensor> outputs, input_gradients;  ///< [step]: values for all rows
  at::Tensor weight_gradient, bias_gradient, mean, variance, batches;
};

/// Returns a loss that is a sum over all elements. The gradient of an element depends on its value.
at::Tensor loss_of(const at::Tensor& output) { return (output * output * 0.5 + output.sin()).sum(); }

template <class Norm>
void set_parameters(Norm& norm, at::ScalarType type) {
  norm->to(type);
  if (!norm->weight.defined()) return;
  const at::NoGradGuard no_grad;
  norm->weight.copy_(at::linspace(0.5, 2, kChannels));
  norm->bias.copy_(at::linspace(-1, 1, kChannels));
}

template <class Norm, class Forward>
Left run_steps(Norm& norm, const Problem& problem, std::int64_t first, std::int64_t count, const Forward& forward) {
  Left left;
  set_parameters(norm, problem.type);
  for (int step = 0; step < 3; ++step) {
    at::Tensor input = batch_of(problem, step).narrow(0, first, count).detach().clone().set_requires_grad(true);
    const at::Tensor output = forward(norm, input);
    loss_of(output).backward();
    left.outputs.push_back(output.detach());
    left.input_gradients.push_back(input.grad());
  }
  if (norm->weight.defined()) left.weight_gradient = norm->weight.grad(), left.bias_gradient = norm->bias.grad();
  left.mean = norm->running_mean, left.variance = norm->running_var, left.batches = norm->num_batches_tracked;
  return left;
}

Left plain(const Problem& problem) {
  const std::int64_t rows = rows_before(problem, static_cast<int>(problem.rows.size()));
  const auto forward = [](auto& norm, const at::Tensor& input) { return norm->forward(input); };
  if (problem.dim <= 3) {
    torch::nn::BatchNorm1d norm(problem.options);
    return run_steps(norm, problem, 0, rows, forward);
  }
  if (problem.dim == 4) {
    torch::nn::BatchNorm2d norm(problem.options);
    return run_steps(norm, problem, 0, rows, forward);
  }
  torch::nn::BatchNorm3d norm(problem.options);
  return run_steps(norm, problem, 0, rows, forward);
}

void expect_near(const at::Tensor& got, const at::Tensor& wanted, const std::string& what) {
  ASSERT_EQ(got.defined(), wanted.defined()) << what;
  if (!got.defined()) return;
  ASSERT_EQ(got.sizes(), wanted.sizes()) << what;
  ASSERT_EQ(got.scalar_type(), wanted.scalar_type()) << what;
  const double tolerance = wanted.scalar_type() == at::kDouble  ? 1e-10
                           : wanted.scalar_type() == at::kFloat ? 2e-4
                                                                : 0.1;
  EXPECT_TRUE(at::allclose(got, wanted, tolerance, tolerance))
      << what << ", off by " << (got - wanted).abs().max().item<double>();
}

template <class MakeNorm, class Forward>
void expect_as_plain(const Problem& problem, const MakeNorm& make, const Forward& forward) {
  const Left wanted = plain(problem);
  const int ranks = static_cast<int>(problem.rows.size());
  std::vector<Left> left(problem.rows.size());
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    auto norm = make(mesh);
    const auto rank = static_cast<std::size_t>(mesh.rank());
    left[rank] = run_steps(norm, problem, rows_before(problem, mesh.rank()), problem.rows[rank], forward);
  });
  at::Tensor weight_gradient, bias_gradient;
  for (int rank = 0; rank < ranks; ++rank) {
    const Left& mine = left[static_cast<std::size_t>(rank)];
    const std::int64_t first = rows_before(problem, rank), count = problem.rows[static_cast<std::size_t>(rank)];
    for (std::size_t step = 0; step < 3; ++step) {
      expect_near(mine.outputs[step], wanted.outputs[step].narrow(0, first, count), "output");
      expect_near(mine.input_gradients[step], wanted.input_gradients[step].narrow(0, first, count), "input gradient");
    }
    expect_near(mine.mean, wanted.mean, "running mean");
    expect_near(mine.variance, wanted.variance, "running variance");
    expect_near(mine.batches, wanted.batches, "batches");
    if (!wanted.weight_gradient.defined()) continue;
    weight_gradient = rank == 0 ? mine.weight_gradient.clone() : weight_gradient + mine.weight_gradient;
    bias_gradient = rank == 0 ? mine.bias_gradient.clone() : bias_gradient + mine.bias_gradient;
  }
  expect_near(weight_gradient, wanted.weight_gradient, "weight gradient");
  expect_near(bias_gradient, wanted.bias_gradient, "bias gradient");
}

const std::vector<std::vector<std::int64_t>> kRows = {{4}, {3, 3}, {2, 5}, {1, 0, 3}, {1, 4, 2, 6}};

TEST(SyncBatchNorm, EqualsOneProcessWithTheWholeBatch) {
  const std::vector<BatchNormOptions> options = {BatchNormOptions(kChannels),
                                                 BatchNormOptions(kChannels).momentum(0.3).eps(1e-2),
                                                 BatchNormOptions(kChannels).momentum(std::nullopt),
                                                 BatchNormOptions(kChannels).affine(false),
                                                 BatchNormOptions(kChannels).track_running_stats(false),
                                                 BatchNormOptions(kChannels).affine(false).track_running_stats(false)};
  for (const std::int64_t dim : {2, 3, 4, 5}) {
    for (const auto& rows : kRows) {
      for (const BatchNormOptions& option : options) {
        const bool is_default = &option == &options.front();
        for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
          if (type == at::kFloat && !is_default) continue;
          expect_as_plain(
              {dim, type, option, rows}, [&](const Mesh& mesh) { return SyncBatchNorm(option, mesh); },
              [](auto& norm, const at::Tensor& input) { return norm->forward(input); });
        }
      }
    }
  }
}

TEST(SyncBatchNorm, RecomputedBatchCountsOnce) {
  for (const auto& momentum : {std::optional<double>(0.1), std::optional<double>()}) {
    const Problem problem{4, at::kDouble, BatchNormOptions(kChannels).momentum(momentum), {2, 5}};
    expect_as_plain(
        problem, [&](const Mesh& mesh) { return SyncBatchNorm(problem.options, mesh); },
        [](auto& norm, const at::Tensor& input) {
          return checkpoint([norm](const at::Tensor& x) mutable { return norm->forward(x); }, input);
        });
  }
}

TEST(ConvertSyncBatchNorm, EqualsOneProcessWithTheWholeBatch) {
  for (const bool recomputes : {false, true}) {
    for (const auto& momentum : {std::optional<double>(0.1), std::optional<double>()}) {
      for (const bool affine : {true, false}) {
        for (const auto& rows : std::vector<std::vector<std::int64_t>>{{4}, {2, 5}, {2, 0, 3}}) {
          const Problem problem{4, at::kDouble, BatchNormOptions(kChannels).momentum(momentum).affine(affine), rows};
          expect_as_plain(
              problem,
              [&](const Mesh& mesh) {
                torch::nn::BatchNorm2d norm(problem.options);
                convert_sync_batchnorm(norm, mesh);
                return norm;
              },
              [&](auto& norm, const at::Tensor& input) {
                if (!recomputes) return norm->forward(input);
                return checkpoint([norm](const at::Tensor& x) mutable { return norm->forward(x); }, input);
              });
        }
      }
    }
  }
}

TEST(ConvertSyncBatchNorm, AllNestedBatchNormsAreConvertedAndNothingElse) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::Sequential inner(torch::nn::BatchNorm2d(3), torch::nn::Linear(2, 2));
    torch::nn::ModuleList model(torch::nn::BatchNorm1d(4), inner, torch::nn::BatchNorm3d(2));
    EXPECT_THAT(convert_sync_batchnorm(model, mesh), ElementsAre("0", "1.0", "2"));
    // A norm that was not converted uses only its own rank's batch.
    torch::nn::BatchNorm1d own(4);
    const at::Tensor input = at::full({3, 4}, mesh.rank() * 10.0) + at::arange(12, at::kFloat).view({3, 4});
    own->forward(input);
    EXPECT_TRUE(at::allclose(own->running_mean, input.mean(0) * 0.1));
    model->ptr(0)->as<torch::nn::BatchNorm1d>()->forward(input);
    EXPECT_TRUE(at::allclose(model->ptr(0)->as<torch::nn::BatchNorm1d>()->running_mean,
                             (at::full({4}, 5.0) + at::arange(12, at::kFloat).view({3, 4}).mean(0)) * 0.1));
  });
}

TEST(SyncBatchNorm, EvalModeEqualsBatchNormWithoutCommunication) {
  for (const bool tracks : {true, false}) {
    const auto options = BatchNormOptions(kChannels).track_running_stats(tracks);
    torch::nn::BatchNorm1d plain_norm(options);
    if (tracks) plain_norm->running_mean.fill_(2);
    plain_norm->eval();
    const at::Tensor input = at::arange(3 * kChannels, at::kFloat).view({3, kChannels});
    run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
      SyncBatchNorm norm(options, mesh);
      torch::nn::BatchNorm1d converted(options);
      convert_sync_batchnorm(converted, mesh);
      if (tracks) norm->running_mean.fill_(2), converted->running_mean.fill_(2);
      norm->eval();
      converted->eval();
      if (mesh.rank() == 1) return;
      EXPECT_TRUE(at::equal(norm->forward(input), plain_norm->forward(input)));
      EXPECT_TRUE(at::equal(converted->forward(input), plain_norm->forward(input)));
    });
  }
}

/// Checks that all ranks get an error with `text`.
void expect_batch_norm_refused(int ranks, const std::function<void(const Mesh&)>& call, const std::string& text) {
  run_ranks({.ranks = ranks},
            [&](const Mesh& mesh) { EXPECT_THAT(usage_error_of([&] { call(mesh); }), HasSubstr(text)); });
}

TEST(SyncBatchNorm, UnsupportedInputsAndDifferingRanksAreRefused) {
  expect_batch_norm_refused(
      3,
      [](const Mesh& mesh) {
        SyncBatchNorm(BatchNormOptions(4), mesh)->forward(at::ones({mesh.rank() == 1, 4}));
      },
      "more than 1 value a channel on all ranks");
  expect_batch_norm_refused(
      1,
      [](const Mesh& mesh) {
        SyncBatchNorm(BatchNormOptions(4), mesh)->forward(at::ones({2, 5}));
      },
      "got Float [2, 5]");
  expect_batch_norm_refused(
      1, [](const Mesh& mesh) { SyncBatchNorm(BatchNormOptions(4), mesh)->forward(at::ones({4})); },
      "2 to 5 dimensions");
  expect_batch_norm_refused(
      2,
      [](const Mesh& mesh) {
        const bool nothing = mesh.rank() == 1;
        torch::nn::Sequential model(
            torch::nn::BatchNorm1d(BatchNormOptions(4).affine(!nothing).track_running_stats(!nothing)));
        convert_sync_batchnorm(model, mesh);
      },
      "rank 1: module 0 is a BatchNorm with neither");
  expect_batch_norm_refused(
      2,
      [](const Mesh& mesh) {
        torch::nn::Sequential model(torch::nn::Linear(2, 2));
        if (mesh.rank() == 1) model->push_back(torch::nn::BatchNorm1d(4));
        convert_sync_batchnorm(model, mesh);
      },
      "rank 1: convert_sync_batchnorm of 1");
  run_ranks({.ranks = 1}, [](const Mesh& mesh) {
    SyncBatchNorm norm(BatchNormOptions(4), mesh);
    const at::Tensor input = at::rand({3, 4}).set_requires_grad(true);
    const at::Tensor loss = norm->forward(input).square().sum();
    EXPECT_THROW(torch::autograd::grad({loss}, {input}, {}, std::nullopt, /*create_graph=*/true), c10::Error);
  });
}

/// A classifier of features with two norms.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(6, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    second = register_module("second", torch::nn::Linear(8, 8));
    other_norm = register_module("other_norm", torch::nn::BatchNorm1d(8));
    head = register_module("head", torch::nn::Linear(8, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = at::relu(norm(first(x)));
    const auto rest = [this](const at::Tensor& z) { return at::relu(other_norm(second(z))); };
    return head(recomputes ? checkpoint(rest, y) : rest(y));
  }
  torch::nn::Linear first{nullptr}, second{nullptr}, head{nullptr};
  torch::nn::BatchNorm1d norm{nullptr}, other_norm{nullptr};
  bool recomputes = false;
};
TORCH_MODULE(Net);

Net make_net() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  at::manual_seed(3);
  return Net();
}

TEST(ConvertSyncBatchNorm, TrainsUnderEveryStrategyLikeOneProcess) {
  const auto batch = [](int step) {
    const at::Tensor x = at::sin(at::arange(12 * 6, at::kFloat).view({12, 6}) * (0.7 + 0.1 * step)) * 2 + 1;
    return std::pair(x, at::arange(12, at::kLong) % 3);
  };
  Net plain_net = make_net();
  const double lr = 0.1;
  for (int step = 0; step < 4; ++step) {
    const auto [x, y] = batch(step);
    plain_net->zero_grad();
    at::cross_entropy_loss(plain_net->forward(x), y).backward();
    const at::NoGradGuard no_grad;
    for (auto& parameter : plain_net->parameters()) parameter.sub_(parameter.grad() * lr);
  }
  for (const int ranks : {1, 2, 3, 4}) {
    for (const Placed& placed : kOnePerPlacement) {
      for (const bool recomputes : {false, true}) {
        SCOPED_TRACE(name_of(placed));
        Strategy strategy = strategy_for(placed);
        strategy.units.classes = {"Linear"};
        strategy.gradient_clipping = 0;
        strategy.optimizer.type = OptimizerType::kSgd;
        strategy.optimizer.lr = lr;
        strategy.optimizer.weight_decay = 0;
        strategy.optimizer.momentum = 0;
        run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
          Net net = make_net();
          net->recomputes = recomputes;
          EXPECT_THAT(convert_sync_batchnorm(net, mesh), ElementsAre("norm", "other_norm"));
          Engine engine(net, strategy, mesh);
          for (int step = 0; step < 4; ++step) {
            const auto [x, y] = batch(step);
            engine.backward(at::cross_entropy_loss(net->forward(rows_of(x, mesh)), rows_of(y, mesh)));
            engine.step();
          }
          const Gathered gathered(engine);
          for (const auto& item : plain_net->named_parameters())
            EXPECT_TRUE(at::allclose(net->named_parameters()[item.key()], item.value(), 1e-4, 1e-5)) << item.key();
          for (const auto& item : plain_net->named_buffers())
            EXPECT_TRUE(at::allclose(net->named_buffers()[item.key()], item.value(), 1e-4, 1e-5)) << item.key();
        });
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
