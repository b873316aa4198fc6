// Trains a generative adversarial network in the plane: its generator learns to put points where the real ones are,
// around (2, -1). There are two modules and two Engines; the generator is trained through the discriminator.
#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>

using torch::nn::Linear;
using torch::nn::ReLU;
using torch::nn::Sequential;

constexpr std::int64_t kBatch = 128, kNoise = 4;

at::Tensor real_points(std::int64_t count) { return at::randn({count, 2}) * 0.3 + at::tensor({2.0f, -1.0f}); }

// Returns how far scores are from `wanted`: 1 for real points, 0 for generated ones.
at::Tensor loss_of(const at::Tensor& scores, double wanted) {
  return at::binary_cross_entropy_with_logits(scores, at::full_like(scores, wanted));
}

int main() {
  return tessera::run([] {
    // The learning rate falls, since the losses of the two networks would oscillate for ever at a constant rate.
    auto strategy = tessera::Strategy::from_json(
        R"({"strategy": "FULL_SHARD", "optimizer": {"type": "adam", "lr": 2e-3, "betas": [0.0, 0.9], "weight_decay": 0.01},
            "lr_schedule": {"type": "cosine", "total_steps": 600}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    auto generator = tessera::deferred_init(
        [] { return Sequential(Linear(kNoise, 32), ReLU(), Linear(32, 32), ReLU(), Linear(32, 2)); });
    auto discriminator =
        tessera::deferred_init([] { return Sequential(Linear(2, 32), ReLU(), Linear(32, 32), ReLU(), Linear(32, 1)); });
    tessera::Engine generating(generator, strategy, mesh), judging(discriminator, strategy, mesh);

    at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));  // each rank draws points of its own
    const std::int64_t own = kBatch / mesh.world_size();
    for (int step = 1; step <= 600; ++step) {
      const at::Tensor made_up = generator->forward(at::randn({own, kNoise}));
      judging.backward(loss_of(discriminator->forward(real_points(own)), 1) +
                       loss_of(discriminator->forward(made_up.detach()), 0));
      const double judges = judging.step().loss;
      // This backward also leaves gradients in the discriminator. The discriminator's Engine drops these gradients,
      // since it did not run this backward.
      generating.backward(loss_of(discriminator->forward(made_up), 1));
      const double fools = generating.step().loss;
      if (step % 100 != 0) continue;
      const at::NoGradGuard no_grad;
      const at::Tensor mean = generator->forward(at::randn({512, kNoise})).mean(0);
      tessera::all_reduce(mesh, mean, tessera::Reduce::kMean);
      if (mesh.is_main())
        std::cout << "step " << step << "  judges " << judges << "  fools " << fools << "  x " << mean[0].item<double>()
                  << "  y " << mean[1].item<double>() << std::endl;
    }
  });
}
