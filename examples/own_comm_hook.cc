// A program's own CommHook sums gradients: each rank sends signs and one scale (EF-signSGD, arXiv 1901.09847),
// and adds the rest to its next gradient (error feedback). A number takes one byte on the wire instead of four.
#include <ATen/Functions.h>
#include <tessera/comm_hook.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <iostream>
#include <map>

struct Signs final : tessera::CommHook {
  void sum(Bucket& bucket, Ranks& ranks) override {
    at::Tensor& lacked = lacked_[bucket.index];
    if (!lacked.defined()) lacked = at::zeros_like(bucket.gradients);
    lacked.add_(bucket.gradients);
    const at::Tensor scale = lacked.abs().mean(), signs = lacked.sign();
    lacked.sub_(signs * scale);
    const auto scales = ranks.all_gather(scale), all = ranks.all_gather(signs.to(at::kChar));
    bucket.gradients.zero_();
    for (std::size_t rank = 0; rank < all.size(); ++rank) bucket.gradients.add_(all[rank] * scales[rank]);
  }

 private:
  std::map<std::int64_t, at::Tensor> lacked_;  ///< error feedback, by bucket
};

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(R"({
      "strategy": "SHARD_GRADIENTS", "units": {"classes": ["Linear"]}, "compression": {"method": {"type": "hook"}},
      "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.0}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    torch::nn::Sequential model(torch::nn::Linear(8, 64), torch::nn::Linear(64, 64), torch::nn::Linear(64, 1));
    tessera::Engine engine(model, strategy, mesh, std::make_shared<Signs>());
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
