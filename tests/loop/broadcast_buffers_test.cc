// Compares running statistics after steps with "broadcast_buffers" with running statistics after calls of sync_buffers.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <gmock/gmock.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <optional>

#include "tessera/sync_buffers.h"
#include "tests/support/session.h"

namespace tessera::testing {
namespace {

/// A module with a batch norm, whose statistics come from each rank's own rows, and with buffers of other kinds.
struct WithStatisticsImpl : torch::nn::Module {
  WithStatisticsImpl() {
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    linear = register_module("linear", torch::nn::Linear(4, 1));
    const at::Tensor seen = register_buffer("seen", at::zeros({2, 3}, at::kDouble).t());
    register_buffer("seen_too", seen);
    register_buffer("flag", at::zeros({}, at::kBool));
    register_buffer("empty", at::zeros({0}));
    register_buffer("absent", at::Tensor());
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::NoGradGuard no_grad;
    named_buffers()["seen"].add_(x.abs().sum());
    named_buffers()["flag"].fill_(x[0][0].item<float>() > 0);
    const at::AutoGradMode grad(true);
    return linear(norm(x));
  }
  torch::nn::BatchNorm1d norm{nullptr};
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(WithStatistics);

/// Returns every buffer on this rank after each of some steps. `by_hand`: how the program calls sync_buffers after a
/// step.
std::vector<at::Tensor> buffers_of_run(const Mesh& mesh, Strategy strategy, BufferBroadcast how,
                                       std::optional<BufferSync> by_hand = std::nullopt) {
  strategy.units.classes = {"Linear"};
  strategy.broadcast_buffers = how;
  WithStatistics model;
  model->to(at::kFloat);
  Engine engine(model, strategy, mesh);
  std::vector<at::Tensor> found;
  at::Generator generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(mesh.rank()) + 1);
  for (int step = 0; step < 3; ++step) {
    for (std::int64_t m = 0; m < strategy.gradient_accumulation; ++m) {
      engine.backward(model->forward(at::randn({6, 4}, generator)).square().mean());
    }
    engine.step();
    if (by_hand) sync_buffers(model, mesh, *by_hand);
    for (const at::Tensor& buffer : model->buffers()) found.push_back(buffer.clone());
  }
  return found;
}

bool all_equal(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& one, const at::Tensor& other) { return at::equal(one, other); });
}

TEST(BroadcastBuffers, EachStepSyncsBuffersAsSyncBuffersDoes) {
  for (const int ranks : {1, 2, 3}) {
    on_placements(
        kInMemory, ranks,
        [&](const Mesh& mesh, const Strategy& strategy) {
          const auto none = buffers_of_run(mesh, strategy, BufferBroadcast::kNone);
          const auto from_zero = buffers_of_run(mesh, strategy, BufferBroadcast::kFromRankZero);
          const auto mean = buffers_of_run(mesh, strategy, BufferBroadcast::kMean);
          EXPECT_TRUE(
              all_equal(from_zero, buffers_of_run(mesh, strategy, BufferBroadcast::kNone, BufferSync::kFromRankZero)));
          EXPECT_TRUE(all_equal(mean, buffers_of_run(mesh, strategy, BufferBroadcast::kNone, BufferSync::kMean)));
          // The option has an effect only if there is more than one rank.
          EXPECT_EQ(all_equal(none, mean), ranks == 1);
          EXPECT_EQ(all_equal(none, from_zero), mesh.rank() == 0);
        },
        [](Strategy& strategy) { strategy.gradient_accumulation = 2; });
  }
}

TEST(BroadcastBuffers, MeanCoversAllRanks) {
  run_ranks({.ranks = 3}, [](const Mesh& mesh) {
    WithStatistics model;
    Strategy strategy = strategy_for(ShardingStrategy::kFullShard);
    strategy.units.classes = {};
    strategy.broadcast_buffers = BufferBroadcast::kMean;
    Engine engine(model, strategy, mesh);
    engine.backward(model->forward(at::full({6, 4}, mesh.rank() + 1.0)).square().mean());
    engine.step();
    // The means are 1, 2 and 3, and momentum is 0.1.
    EXPECT_TRUE(at::allclose(model->norm->running_mean, at::full({4}, 0.2)));
    EXPECT_EQ(model->norm->num_batches_tracked.item<std::int64_t>(), 1);
    EXPECT_TRUE(at::allclose(model->named_buffers()["seen"], at::full({3, 2}, 48.0, at::kDouble)));
  });
}

}  // namespace
}  // namespace tessera::testing
