// Fine-tuning: a network that was trained on one task is loaded and trained on another. The new head trains first,
// alone, with the body frozen. Then the whole network trains, the body at a tenth of the rate and without decay of
// biases.
#include <ATen/Functions.h>
#include <tessera/tessera.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <iostream>

struct NetworkImpl : torch::nn::Module {
  NetworkImpl() {
    body = register_module("body", torch::nn::Sequential(torch::nn::Linear(2, 64), torch::nn::Tanh(),
                                                         torch::nn::Linear(64, 64), torch::nn::Tanh()));
    head = register_module("head", torch::nn::Linear(64, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return head(body->forward(x)); }
  torch::nn::Sequential body{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Network);

// The two tasks are functions on the plane that have much in common.
at::Tensor first_task(const at::Tensor& x) { return at::sin(x.select(1, 0) * 3) * at::cos(x.select(1, 1) * 3); }
at::Tensor second_task(const at::Tensor& x) { return 0.5 - first_task(x) * (1 + 0.5 * x.select(1, 0)); }

using Task = at::Tensor (*)(const at::Tensor&);

void train(tessera::Engine& engine, Network& model, const tessera::Mesh& mesh, Task task, const std::string& phase,
           int steps) {
  double loss = 0;
  for (int step = 1; step <= steps; ++step) {
    const at::Tensor x = at::rand({128 / mesh.world_size(), 2}) * 2 - 1;
    engine.backward((model->forward(x).squeeze(1) - task(x)).square().mean());
    loss += (engine.step().loss - loss) / std::min(step, 20);  // running mean of about the last 20 losses
  }
  if (mesh.is_main()) std::cout << phase << " 1  loss " << loss << std::endl;
}

int main(int argc, char** argv) {
  if (argc != 2) return 64;  // command line: finetune weights.pt
  return tessera::run([&] {
    auto strategy = tessera::Strategy::from_json(R"({"strategy": "FULL_SHARD", "optimizer": {"lr": 3e-3}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    {
      auto model = tessera::deferred_init([] { return Network(); });
      tessera::Engine engine(model, strategy, mesh);
      at::manual_seed(tessera::seed_for_rank(1, mesh.rank()));
      train(engine, model, mesh, first_task, "pretrained", 400);
      tessera::save_weights(engine, argv[1]);
    }
    auto groups = tessera::Strategy::from_json(R"({
      "strategy": "FULL_SHARD",
      "optimizer": {"lr": 3e-3, "groups": [
        {"name": "biases", "match": ["body.*.bias"], "lr_ratio": 0.1, "weight_decay": 0},
        {"name": "body", "match": ["body.*.weight"], "lr_ratio": 0.1}]}})");
    Network model;
    tessera::load_weights(model, argv[1]);
    tessera::Engine engine(model, groups, mesh);
    engine.set_trainable("body.*", false);
    train(engine, model, mesh, second_task, "head", 300);
    engine.set_trainable("body.*", true);
    train(engine, model, mesh, second_task, "all", 300);
  });
}
