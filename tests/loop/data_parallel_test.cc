// Compares DataParallel with one process of plain LibTorch that trains on the whole batch, for several of LibTorch's
// own optimizers.

#include "tessera/data_parallel.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <limits>

#include "tessera/collectives.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

using ::testing::HasSubstr;
using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;

const std::vector<std::pair<std::string, MakeOptimizer>> kOptimizers = {
    {"sgd",
     [](std::vector<at::Tensor> parameters) {
       return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
     }},
    {"adamw",
     [](std::vector<at::Tensor> parameters) {
       return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(0.01));
     }},
    {"lbfgs", [](std::vector<at::Tensor> parameters) {
       return std::make_unique<torch::optim::LBFGS>(std::move(parameters), torch::optim::LBFGSOptions(0.5).max_iter(4));
     }}};

/// Returns the module's parameters that are trained, each of them once.
std::vector<at::Tensor> parameters_of(const torch::nn::Module& module) {
  std::vector<at::Tensor> once;
  for (const at::Tensor& parameter : module.parameters()) {
    const auto same = [&](const at::Tensor& other) { return other.is_same(parameter); };
    if (parameter.requires_grad() && std::none_of(once.begin(), once.end(), same)) once.push_back(parameter);
  }
  return once;
}

/// Trains, and returns the values. `mesh` is null for one process with the whole batch.
Values train(Tiny& model, const MakeOptimizer& make, const Mesh* mesh) {
  const auto optimizer = make(parameters_of(*model));
  for (const Batch& batch : make_batches(3, 12, 5, model->options.vocab)) {
    const at::Tensor tokens = mesh ? rows_of(batch.tokens, *mesh) : batch.tokens;
    const at::Tensor targets = mesh ? rows_of(batch.targets, *mesh) : batch.targets;
    optimizer->step([&] {
      optimizer->zero_grad();
      const at::Tensor loss = model->forward(tokens, targets);
      loss.backward();
      if (!mesh) return loss;
      return at::scalar_tensor(all_reduce(*mesh, loss.item<double>(), Reduce::kMean), at::kFloat);
    });
  }
  return values_of(*model);
}

/// Checks that values are close. Ranks add up gradients in another order than one process does. This matters more for
/// LBFGS, which divides by differences of gradients.
void expect_near(const Values& got, const Values& wanted, const std::string& name, int ranks) {
  ASSERT_EQ(got.size(), wanted.size());
  const double looser = name == "lbfgs" ? 10 : 1;
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_TRUE(at::allclose(got[i].second, wanted[i].second, looser * 1e-4, looser * 2e-5))
        << name << " on " << ranks << ", " << got[i].first;
  }
}

TEST(DataParallel, TrainsLikeOneProcessWithLibTorchOptimizers) {
  const TinyOptions kModels[] = {{},
                                 {.tied_head = true, .frozen_first_block = true},
                                 {.unused_block = true, .shared_block = true},
                                 {.recompute = true},
                                 {.shared_block = true, .recompute = true}};
  for (const TinyOptions& options : kModels) {
    for (const auto& [name, make] : kOptimizers) {
      Tiny plain = make_tiny(options, false);
      const Values wanted = train(plain, make, nullptr);
      for (const int ranks : {1, 2, 3, 4}) {
        for (const double bucket_mb : {25.0, 0.002}) {
          if (ranks % 2 == (bucket_mb == 25.0 ? 1 : 0) && ranks > 2) continue;  // 4 ranks: large buckets; 3: small ones
          std::vector<Values> all(static_cast<std::size_t>(ranks));
          run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
            Tiny model = make_tiny(options, false);
            if (!mesh.is_main()) {
              const at::NoGradGuard no_grad;
              for (auto& parameter : model->parameters()) parameter.zero_();  // rank 0's values replace these
            }
            const DataParallel parallel(model, mesh, {.bucket_mb = bucket_mb});
            EXPECT_EQ(parallel.num_buckets() == 1, bucket_mb == 25.0);
            all[static_cast<std::size_t>(mesh.rank())] = train(model, make, &mesh);
          });
          for (const Values& values : all) EXPECT_TRUE(all_same_bits(values, all[0])) << name;
          expect_near(all[0], wanted, name, ranks);
        }
      }
    }
  }
}

TEST(DataParallel, GradientMissingOnSomeRanksCountsAsZero) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(2, 2), torch::nn::Linear(2, 2), torch::nn::Linear(2, 2));
    const DataParallel parallel(model, mesh);
    const auto layer = [&](std::size_t i) { return model->ptr(i)->as<torch::nn::Linear>(); };
    at::Tensor y = layer(0)->forward(at::ones({1, 2}));
    if (mesh.rank() == 1) y = layer(1)->forward(y.detach());
    y.sum().backward();
    EXPECT_TRUE(at::allclose(layer(0)->bias.grad(), at::full({2}, 2.0 / 3)));
    EXPECT_TRUE(at::allclose(layer(1)->bias.grad(), at::full({2}, 1.0 / 3)));
    EXPECT_FALSE(layer(2)->bias.grad().defined());
  });
}

TEST(DataParallel, UnsyncedGradientsAddUpAndAreAveragedOnce) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::Linear model(2, 1);
    DataParallel parallel(model, mesh);
    const double mine = mesh.rank() + 1.0;
    {
      const DataParallel::NoSync no_sync(parallel);
      (model->forward(at::ones({1, 2})) * mine).sum().backward();
      EXPECT_EQ(model->bias.grad().item<double>(), mine);
    }
    (model->forward(at::ones({1, 2})) * 10 * mine).sum().backward();
    EXPECT_DOUBLE_EQ(model->bias.grad().item<double>(), 1.5 + 15);
    (model->forward(at::ones({1, 2})) * mine).sum().backward();  // here .grad already holds an average
    EXPECT_DOUBLE_EQ(model->bias.grad().item<double>(), 1.5 + 15 + 1.5);
  });
}

// Rank r has r + 1 of six rows. The last rank has no rows of the second batch.
TEST(DataParallel, WeightedRanksGiveTheMeanOverAllRows) {
  const auto gradients_of = [](const Tiny& model) {
    std::vector<at::Tensor> gradients;
    for (const at::Tensor& parameter : parameters_of(*model)) gradients.push_back(parameter.grad().clone());
    return gradients;
  };
  const Batch batch = make_batches(1, 6, 5, TinyOptions().vocab)[0];
  for (const std::int64_t rows : {6, 3}) {
    Tiny plain = make_tiny({}, false);
    plain->forward(batch.tokens.narrow(0, 0, rows), batch.targets.narrow(0, 0, rows)).backward();
    const std::vector<at::Tensor> wanted = gradients_of(plain);
    run_ranks({.ranks = 3}, [&](const Mesh& mesh) {
      Tiny model = make_tiny({}, false);
      DataParallel parallel(model, mesh);
      const std::int64_t own = mesh.rank() + 1, first = own * (own - 1) / 2;
      const auto loss = [&] {
        return model->forward(batch.tokens.narrow(0, first, own), batch.targets.narrow(0, first, own));
      };
      for (const bool has_batch : {false, true}) {
        for (at::Tensor& parameter : model->parameters()) parameter.mutable_grad().reset();
        const bool counts = first < rows;
        if (!counts && !has_batch) {
          parallel.backward_nothing();
        } else {
          parallel.set_weight(counts ? static_cast<double>(own) : 0);
          (counts ? loss() : loss() * std::numeric_limits<float>::quiet_NaN()).backward();
        }
        const std::vector<at::Tensor> got = gradients_of(model);
        for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-5, 1e-6)) << i;
      }
      EXPECT_THROW(parallel.set_weight(-1), Error);
    });
  }
}

TEST(DataParallel, GradientsKeepTheirDtype) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::Sequential model(torch::nn::Linear(3, 3), torch::nn::Linear(3, 3), torch::nn::Linear(3, 3));
    model->ptr(0)->to(at::kDouble);
    model->ptr(1)->to(at::kBFloat16);
    const DataParallel parallel(model, mesh);
    EXPECT_EQ(parallel.num_buckets(), 2u);
    for (std::size_t i = 0; i < 3; ++i) {
      auto* layer = model->ptr(i)->as<torch::nn::Linear>();
      const at::ScalarType type = layer->bias.scalar_type();
      // The numbers in fp64 have more digits here than fp32 can hold.
      const double value = type == at::kDouble ? 1 + 1e-12 * (mesh.rank() + 1) : mesh.rank() + 1.0;
      (layer->forward(at::ones({1, 3}, type)) * value).sum().backward();
      EXPECT_EQ(layer->bias.grad().scalar_type(), type);
      EXPECT_NEAR(layer->bias.grad()[0].item<double>(), type == at::kDouble ? 1 + 1.5e-12 : 1.5, 1e-15);
    }
  });
}

TEST(DataParallel, BuffersAreRankZerosAtStartAndOnRequest) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    torch::nn::BatchNorm1d norm(4);
    norm->running_mean.fill_(mesh.rank() + 5.0);
    DataParallel parallel(norm, mesh);
    EXPECT_EQ(norm->running_mean[0].item<double>(), 5);
    norm->running_mean.fill_(mesh.rank() + 7.0);
    parallel.broadcast_buffers();
    EXPECT_EQ(norm->running_mean[0].item<double>(), 7);
  });
}

TEST(DataParallel, BackwardAfterAThrownOneAveragesAgain) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::Linear model(2, 1);
    const DataParallel parallel(model, mesh);
    at::Tensor x = at::ones({1, 2}).set_requires_grad(true);
    const at::Tensor passed = x * 1;
    passed.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("from a hook"); });
    EXPECT_ANY_THROW(model->forward(passed).sum().backward());
    model->zero_grad();
    (model->forward(at::ones({1, 2})) * (mesh.rank() + 1.0)).sum().backward();
    EXPECT_DOUBLE_EQ(model->bias.grad().item<double>(), 1.5);
  });
}

TEST(DataParallel, GradientsAreLocalAfterItsEnd) {
  run_ranks({.ranks = 2}, [](const Mesh& mesh) {
    torch::nn::Linear model(2, 1);
    { const DataParallel parallel(model, mesh); }
    if (mesh.rank() == 1) return;
    model->forward(at::ones({1, 2})).sum().backward();
    EXPECT_EQ(model->bias.grad().item<double>(), 1);
  });
}

/// Checks that all ranks get an error with all of `texts`.
void expect_data_parallel_refused(const std::function<void(const Mesh&)>& call, const std::vector<std::string>& texts) {
  run_ranks({.ranks = 2}, [&](const Mesh& mesh) {
    try {
      call(mesh);
      ADD_FAILURE() << "no error, but should have: " << texts[0];
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kUsage) << error.message();
      for (const std::string& text : texts) EXPECT_THAT(error.message(), HasSubstr(text));
    }
  });
}

TEST(DataParallel, DifferencesBetweenRanksAreNamed) {
  expect_data_parallel_refused(
      [](const Mesh& mesh) { DataParallel(torch::nn::Linear(2, mesh.rank() + 1), mesh); },
      {"rank 1: DataParallel: the module has parameter weight of Float [2, 2] where rank 0's has parameter "
       "weight of Float "
       "[1, 2]"});
  expect_data_parallel_refused(
      [](const Mesh& mesh) {
        DataParallel(torch::nn::Linear(torch::nn::LinearOptions(2, 2).bias(mesh.rank() == 1)), mesh);
      },
      {"rank 1: ", "parameter bias of Float [2] where rank 0's has nothing more"});
  expect_data_parallel_refused(
      [](const Mesh& mesh) { DataParallel(torch::nn::Linear(2, 2), mesh, {.bucket_mb = mesh.rank() + 1.0}); },
      {"rank 0: DataParallel with buckets of 1 MiB", "rank 1: DataParallel with buckets of 2 MiB"});
}

TEST(DataParallel, SparseGradientsAndWrongOptionsAreRefused) {
  expect_data_parallel_refused([](const Mesh& mesh) { DataParallel(torch::nn::Linear(2, 2), mesh, {.bucket_mb = 0}); },
                               {"bucket_mb"});
  expect_data_parallel_refused(
      [](const Mesh& mesh) { DataParallel(deferred_init([] { return torch::nn::Linear(2, 2); }), mesh); },
      {"parameter weight is deferred", "materialize_module"});
  expect_data_parallel_refused(
      [](const Mesh& mesh) {
        torch::nn::Linear model(2, 2);
        const DataParallel first(model, mesh), second(model, mesh);
      },
      {"parameter weight belongs to"});
  expect_data_parallel_refused(
      [](const Mesh& mesh) {
        torch::nn::Embedding model(torch::nn::EmbeddingOptions(4, 2).sparse(mesh.rank() == 1));
        const DataParallel parallel(model, mesh);
        model->forward(at::zeros({1}, at::kLong)).sum().backward();
      },
      {"the gradient of weight is sparse on rank 1"});
}

}  // namespace
}  // namespace tessera::testing
