// The program defines an update rule, which is sharded like the built-in rules. Gradients are divided by a running mean
// of their magnitude, and weights decay towards zero.
#include <ATen/Functions.h>
#include <tessera/elementwise_optimizer.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

struct MeanMagnitude final : tessera::ElementwiseOptimizer {
  std::vector<std::string> states() const override { return {"magnitude"}; }
  void update(Elements& e) const override {
    at::Tensor& magnitude = e.states[0];
    magnitude.mul_(0.95).add_(e.gradient.abs(), 0.05);
    e.parameters.mul_(1 - e.lr * e.weight_decay).sub_(e.gradient / (magnitude + 1e-6), e.lr);
  }
};

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(R"({
      "strategy": "FULL_SHARD", "units": {"classes": ["Linear"]},
      "optimizer": {"type": "own", "lr": 3e-3, "groups": [{"max_dim": 1, "weight_decay": 0.0}]}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Linear(64, 64), torch::nn::Linear(64, 1));
    tessera::Engine engine(model, strategy, mesh, std::make_shared<MeanMagnitude>());
    at::manual_seed(tessera::seed_for_rank(2, mesh.rank()));  // each rank has samples of its own
    for (int step = 1; step <= 300; ++step) {
      const at::Tensor input = at::randn({16, 8}), wanted = input.sin().sum(1, /*keepdim=*/true);
      at::Tensor hidden = input;
      for (std::size_t i = 0; i + 1 < model->size(); ++i)
        hidden = at::tanh(model[i]->as<torch::nn::Linear>()->forward(hidden));
      engine.backward(at::mse_loss(model[2]->as<torch::nn::Linear>()->forward(hidden), wanted));
      const tessera::StepResult result = engine.step();
      if (mesh.is_main() && step % 50 == 0) std::cout << "step " << step << "  loss " << result.loss << std::endl;
    }
  });
}
