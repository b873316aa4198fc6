// Physics: a network learns the solution of an equation from the equation alone. u'' = -4 u with u(0) = 1 and u'(0) = 0
// has the solution cos(2 t). Each rank draws its own points in time. The loss measures how far the network is from
// solving the equation at these points.
#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

using torch::nn::Linear;
using torch::nn::Sequential;
using torch::nn::Tanh;

constexpr std::int64_t kPoints = 128;
constexpr double kSquareOfFrequency = 4;

// Returns the derivative of each u with respect to its own t. The result has a graph, so that it can be differentiated
// again and trained.
at::Tensor derivative(const at::Tensor& u, const at::Tensor& t) {
  return torch::autograd::grad({u.sum()}, {t}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
}

// The network's result is multiplied by t * t, so that u(0) = 1 and u'(0) = 0 whatever its weights are.
at::Tensor solution(Sequential& network, const at::Tensor& t) { return 1 + t * t * network->forward(t); }

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(
        R"({"units": {"classes": ["Linear"]}, "optimizer": {"type": "adam", "lr": 1e-2, "weight_decay": 0},
            "lr_schedule": {"type": "cosine", "total_steps": 600}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    auto network =
        tessera::deferred_init([] { return Sequential(Linear(1, 32), Tanh(), Linear(32, 32), Tanh(), Linear(32, 1)); });
    tessera::Engine engine(network, strategy, mesh);

    at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));
    for (int step = 1; step <= 600; ++step) {
      const at::Tensor t = (2 * at::rand({kPoints / mesh.world_size(), 1})).requires_grad_();
      const at::Tensor u = solution(network, t);
      engine.backward((derivative(derivative(u, t), t) + kSquareOfFrequency * u).square().mean());
      const double loss = engine.step().loss;
      if (step % 100 != 0) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor when = at::linspace(0, 2, 64).unsqueeze(1);
      const double error = (solution(network, when) - at::cos(2 * when)).abs().max().item<double>();
      if (mesh.is_main()) std::cout << "step " << step << "  loss " << loss << "  error " << error << std::endl;
    }
  });
}
