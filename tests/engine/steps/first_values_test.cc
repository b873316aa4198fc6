// Tests that every rank has rank 0's parameters when the Engine has been made, whatever values the rank itself had
// made.

#include "engine/parameters/first_values.h"

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <gmock/gmock.h>
#include <torch/nn/init.h>
#include <torch/nn/modules.h>
#include <torch/utils.h>

#include <mutex>

#include "runtime/comm/shared/run_ranks.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace first_values_test {

using ::testing::AllOf;
using ::testing::HasSubstr;

/// A module with parameters of every kind. Some are large and divided over ranks, and others are small. Some can be
/// made in pieces, and others cannot.
struct KindsImpl : torch::nn::Module {
  explicit KindsImpl(bool uniform = false, bool extra = false) {
    register_module("first", torch::nn::Linear(67, 129));
    register_module("orthogonal", torch::nn::Linear(90, 60));
    register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({33})));
    register_module("embedding", torch::nn::Embedding(torch::nn::EmbeddingOptions(301, 17).padding_idx(3)));
    register_module("lstm", torch::nn::LSTM(9, 11));
    register_module("last", torch::nn::Linear(129, 67));
    const at::NoGradGuard no_grad;
    auto all = named_parameters();
    torch::nn::init::orthogonal_(all["orthogonal.weight"]);
    if (uniform) {
      all["last.weight"].uniform_(-1, 1);
    } else {
      all["last.weight"].normal_(0, 0.02);
    }
    register_parameter("scaled", at::randn({5003}) * 0.02);
    register_parameter("turned", at::randn({70, 80}).t());
    register_parameter("frozen", at::ones({4001}), /*requires_grad=*/false);
    register_parameter("counts", at::arange(5000), /*requires_grad=*/false);
    if (extra) register_parameter("more", at::ones({3}));
  }
};
TORCH_MODULE(Kinds);

/// Runs each test with one thread. The bits of a QR decomposition, which `orthogonal_` makes, depend on the number of
/// threads that MKL uses. MKL chooses this number again for each call.
class FirstValues : public ::testing::Test {
 protected:
  FirstValues() : threads_(at::get_num_threads()) { at::set_num_threads(1); }
  ~FirstValues() override { at::set_num_threads(threads_); }

 private:
  const int threads_;
};

/// Ranks are threads and share LibTorch's default generator.
std::mutex generator_mutex;

template <class Build>
auto with_seed(std::uint64_t seed, const Build& build) {
  const std::lock_guard lock(generator_mutex);
  torch::manual_seed(seed);
  return build();
}

Strategy strategy_of(const Placed& placed, DType dtype, bool bucketed) {
  Strategy strategy;
  place(strategy, placed);
  strategy.mixed_precision.param = dtype;
  if (bucketed) {
    strategy.units.bucket_cap_mb = 0.01;
  } else {
    strategy.units.classes = {"Linear", "LSTM"};
  }
  return strategy;
}

using BuildOnRank = std::function<Kinds(int rank)>;

/// Makes an Engine on every rank. `expected` has the right values, whatever rank made them.
void expect_values(int ranks, const BuildOnRank& build, const Values& expected) {
  for (const Placed& placed : kOnePerPlacement) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(name_of(placed) + ", " + std::string(tessera::name_of(dtype)) + ", ranks " + std::to_string(ranks));
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        Kinds model = build(mesh.rank());
        Engine engine(model, strategy_of(placed, dtype, false), mesh);
        const Gathered gathered(engine);
        Values values = values_of(*model);
        ASSERT_EQ(values.size(), expected.size());
        for (std::size_t i = 0; i < values.size(); ++i) {
          const bool kept = dtype == DType::kF32 || expected[i].first == "counts";
          const at::Tensor want = kept ? expected[i].second : expected[i].second.to(at::kBFloat16).to(at::kFloat);
          EXPECT_TRUE(same_bits(values[i].second, want)) << values[i].first << " on rank " << mesh.rank();
        }
      });
    }
  }
}

Values eager_values(std::uint64_t seed) {
  return with_seed(seed, [] { return values_of(*Kinds()); });
}

Kinds deferred_kinds(std::uint64_t seed) {
  return with_seed(seed, [] { return deferred_init([] { return Kinds(); }); });
}

TEST_F(FirstValues, DeferredOnAllRanksEqualEager) {
  const Values expected = eager_values(5);
  for (const int ranks : {1, 2, 3, 4}) {
    expect_values(
        ranks, [](int) { return deferred_kinds(5); }, expected);
  }
}

TEST_F(FirstValues, RanksWithOtherSeedsGetRankZerosValues) {
  const Values expected = eager_values(5);
  for (const int ranks : {2, 3}) {
    expect_values(
        ranks, [](int rank) { return deferred_kinds(static_cast<std::uint64_t>(5 + rank)); }, expected);
  }
}

TEST_F(FirstValues, EagerModulesOnSomeRanksGetRankZerosValues) {
  const Values expected = eager_values(5);
  const auto eager = [](std::uint64_t seed) { return with_seed(seed, [] { return Kinds(); }); };
  for (const int real : {0, 1}) {
    expect_values(
        3, [&](int rank) { return rank == real ? eager(5) : deferred_kinds(5); }, expected);
  }
  expect_values(
      2, [&](int rank) { return eager(static_cast<std::uint64_t>(5 + rank)); }, expected);
}

/// Returns the error message of each rank's Engine.
std::vector<std::string> messages(int ranks, const BuildOnRank& build) {
  std::vector<std::string> all(static_cast<std::size_t>(ranks), "nothing was thrown");
  run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
    try {
      Kinds model = build(mesh.rank());
      const Engine engine(model, strategy_of(ShardingStrategy::kFullShard, DType::kF32, false), mesh);
    } catch (const Error& error) {
      EXPECT_EQ(error.exit_code(), ExitCode::kUsage);
      all[static_cast<std::size_t>(mesh.rank())] = error.message();
    }
  });
  return all;
}

TEST_F(FirstValues, DifferentInitialisationOnARankIsNamed) {
  const auto all = messages(3, [](int rank) {
    return with_seed(5, [&] { return deferred_init([&] { return Kinds(/*uniform=*/rank == 2); }); });
  });
  for (const std::string& message : all) {
    EXPECT_THAT(message, AllOf(HasSubstr("parameter last.weight"), HasSubstr("aten::normal_"), HasSubstr("on rank 0"),
                               HasSubstr("aten::uniform_"), HasSubstr("on rank 2")));
  }
}

TEST_F(FirstValues, ParameterOnOneRankOnlyIsAnError) {
  // The extra parameter belongs to the root, so units differ only in that parameter.
  const auto all = messages(2, [](int rank) {
    return with_seed(5, [&] { return deferred_init([&] { return Kinds(false, /*extra=*/rank == 1); }); });
  });
  for (const std::string& message : all) {
    EXPECT_THAT(message, AllOf(HasSubstr("more"), HasSubstr("on rank 0"), HasSubstr("on rank 1")));
  }
}

TEST_F(FirstValues, ModuleMadeForShapesOnlyCannotTrain) {
  EXPECT_THROW(
      {
        try {
          run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
            Kinds model = shapes_only([] { return Kinds(); });
            const Engine engine(model, strategy_of(ShardingStrategy::kNoShard, DType::kF32, false), mesh);
          });
        } catch (const std::exception& error) {
          EXPECT_THAT(error.what(), HasSubstr("shapes_only"));
          throw;
        }
      },
      std::exception);
}

}  // namespace first_values_test
}  // namespace tessera::testing
