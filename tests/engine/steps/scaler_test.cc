// Tests loss scaling end to end: an fp16 Engine decides as torch.amp.GradScaler does, step by step.

#include <gmock/gmock.h>

#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "runtime/base/status.h"
#include "runtime/comm/shared/run_ranks.h"
#include "tests/oracle/child.h"
#include "tests/support/stderr_of.h"
#include "tests/support/train_helpers.h"

namespace tessera::testing {
namespace scaler_test {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

// The pattern contains six cases: growth after three finite steps; a shorter run of finite steps; overflows in a row;
// growth after falls; an overflow in the very step in which the scale would have grown; and an overflow at the end.
const std::string kPattern = "....x..xx...x......x..x...xxx......x";
constexpr double kInitial = 512;
constexpr std::int64_t kGrowthInterval = 3;

struct Decisions {
  std::vector<double> scales;
  std::vector<bool> skipped;
  double last_scale = 0;
};

Decisions decisions_of_python() {
  const auto folder = std::filesystem::path(::testing::TempDir()) / "tessera_scaler_test";
  std::filesystem::create_directories(folder);
  const auto printed = oracle::run_python("grad_scaler.py",
                                          {"--pattern", kPattern, "--initial", std::to_string(kInitial),
                                           "--growth-interval", std::to_string(kGrowthInterval)},
                                          folder, 120);
  EXPECT_TRUE(printed.ok()) << message_of(printed.status());
  std::filesystem::remove_all(folder);
  if (!printed.ok()) return {};
  const auto json = nlohmann::json::parse(*printed);
  return {json.at("scales"), json.at("skipped"), json.at("last_scale")};
}

/// Returns the decisions of an Engine. `x` in the pattern means an infinite loss on one rank. The ranks take
/// turns.
Decisions decisions_of_engine(const Mesh& mesh, ShardingStrategy kind) {
  Strategy strategy = tiny_strategy(kind, DType::kF16);
  strategy.optimizer.lr = 1e-4;
  strategy.mixed_precision.loss_scale = {.initial = kInitial, .growth_interval = kGrowthInterval};
  Tiny model = make_tiny({}, true);
  Engine engine(model, strategy, mesh);
  const auto batches = make_batches(4, 6, 5, 19);
  Decisions decisions;
  for (std::size_t i = 0; i < kPattern.size(); ++i) {
    const Batch& batch = batches[i % batches.size()];
    at::Tensor loss = model->forward(batch.tokens, batch.targets);
    if (kPattern[i] == 'x' && static_cast<int>(i) % mesh.world_size() == mesh.rank()) {
      loss = loss * std::numeric_limits<double>::infinity();
    }
    engine.backward(loss);
    const StepResult result = engine.step();
    decisions.scales.push_back(result.loss_scale);
    decisions.skipped.push_back(result.overflow);
  }
  decisions.last_scale = engine.loss_scale();
  return decisions;
}

TEST(LossScaling, ScalesAndSkipsEqualGradScaler) {
  if (!oracle::python_has_torch()) GTEST_SKIP() << TESSERA_ORACLE_PYTHON " has no torch";
  const Decisions wanted = decisions_of_python();
  ASSERT_EQ(wanted.scales.size(), kPattern.size());
  EXPECT_GT(*std::max_element(wanted.scales.begin(), wanted.scales.end()), kInitial) << "the scale never grew";
  EXPECT_LT(*std::min_element(wanted.scales.begin(), wanted.scales.end()), kInitial) << "the scale never fell";
  for (ShardingStrategy kind :
       {ShardingStrategy::kNoShard, ShardingStrategy::kShardGradients, ShardingStrategy::kFullShard}) {
    for (int ranks : {1, 2, 3}) {
      run_ranks({.ranks = ranks}, [&](const Mesh& mesh) {
        const Decisions got = decisions_of_engine(mesh, kind);
        EXPECT_EQ(got.scales, wanted.scales) << name_of(kind) << ", rank " << mesh.rank() << " of " << ranks;
        EXPECT_EQ(got.skipped, wanted.skipped) << name_of(kind) << ", rank " << mesh.rank() << " of " << ranks;
        EXPECT_EQ(got.last_scale, wanted.last_scale);
      });
    }
  }
}

TEST(LossScaling, ModuleInFp16WithoutScalingIsWarnedOfByName) {
  const auto said = [](at::ScalarType type, DType param) {
    return stderr_of([&] {
      run_ranks({.ranks = 1}, [&](const Mesh& mesh) {
        Tiny model = make_tiny({}, /*deferred=*/false);
        model->to(type);
        const Engine engine(model, tiny_strategy(ShardingStrategy::kFullShard, param), mesh);
      });
    });
  };
  const auto is_told = AllOf(HasSubstr("fp16 in the module"), HasSubstr("the loss is not scaled"),
                             HasSubstr(R"("mixed_precision": {"param": "fp16"})"));
  EXPECT_THAT(said(at::kHalf, DType::kF32), is_told);
  EXPECT_THAT(said(at::kHalf, DType::kF16), Not(HasSubstr("not scaled")));
  EXPECT_THAT(said(at::kHalf, DType::kBF16), Not(HasSubstr("not scaled"))) << "its parameters become bf16";
  EXPECT_THAT(said(at::kBFloat16, DType::kF32), Not(HasSubstr("not scaled")));
}

}  // namespace scaler_test
}  // namespace tessera::testing
