#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(R"({"optimizer": {"type": "sgd", "lr": 0.1}})");
    tessera::Mesh mesh = tessera::init(strategy);
    auto model = tessera::deferred_init([] { return torch::nn::Linear(4, 1); });
    tessera::Engine engine(model, strategy, mesh);
    const at::Tensor input = at::ones({8, 4});
    for (int step = 0; step < 20; ++step) {
      engine.backward((model->forward(input) - 1).square().mean());
      const double loss = engine.step().loss;
      if (mesh.rank() == 0) std::cout << "step " << step << "  loss " << loss << std::endl;
    }
  });
}
