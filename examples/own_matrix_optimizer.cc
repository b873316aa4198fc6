// The program defines an update rule for whole matrices (Shampoo, arXiv 1802.09568), which is sharded like the built-in
// rules. Gradients are multiplied by inverse roots of running sums over their rows and over their columns. AdamW
// updates the vectors.
#include <ATen/Functions.h>
#include <tessera/matrix_optimizer.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

struct Shampoo final : tessera::MatrixOptimizer {
  std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
    return {{"left", {rows, rows}}, {"right", {columns, columns}}};
  }
  void update(Matrix& m) const override {
    m.states[0].add_(m.gradient.mm(m.gradient.t()));
    m.states[1].add_(m.gradient.t().mm(m.gradient));
    m.parameter.mul_(1 - m.lr * m.weight_decay)
        .sub_(inverse_fourth_root(m.states[0]).mm(m.gradient).mm(inverse_fourth_root(m.states[1])), m.lr);
  }
  static at::Tensor inverse_fourth_root(const at::Tensor& sums) {
    const auto [values, vectors] = at::linalg_eigh(sums);
    return (vectors * (values.clamp_min(0) + 1e-6).pow(-0.25)).mm(vectors.t());
  }
};

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(R"({
      "strategy": "FULL_SHARD", "units": {"classes": ["Linear"]},
      "optimizer": {"type": "own_matrix", "lr": 3e-2, "weight_decay": 0.0, "groups": [{"max_dim": 1, "lr_ratio": 0.1}]}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Linear(64, 64), torch::nn::Linear(64, 1));
    tessera::Engine engine(model, strategy, mesh, std::make_shared<Shampoo>());
    at::manual_seed(tessera::seed_for_rank(2, mesh.rank()));  // each rank has samples of its own
    for (int step = 1; step <= 200; ++step) {
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
