// A program outside the tree: sees the installed package and nothing else.
#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/linear.h>

#include <cstdio>

int main() {
  tessera::Strategy strategy = tessera::Strategy::from_json(R"({"optimizer": {"type": "sgd", "lr": 0.1}})");
  tessera::Mesh mesh = tessera::init(strategy);
  auto model = tessera::deferred_init([] { return torch::nn::Linear(4, 1); });
  tessera::Engine engine(model, strategy, mesh);
  const at::Tensor input = at::ones({8, 4});
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    engine.backward((model->forward(input) - 1).square().mean());
    last = engine.step().loss;
    if (step == 0) first = last;
  }
  std::printf("loss %.6f -> %.6f\n", first, last);
  return last < first / 10 ? 0 : 1;
}
