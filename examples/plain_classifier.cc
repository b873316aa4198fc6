// Trains a network that tells three spirals apart, with plain LibTorch. docs/start-cpp.md shows the lines that shard
// the network.
#include <ATen/Functions.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/samplers/random.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adamw.h>

#include <iostream>

constexpr std::int64_t kArms = 3;

// Points of the plane on the arms of a spiral, with the arm of each.
struct Spirals : torch::data::datasets::Dataset<Spirals> {
  explicit Spirals(std::size_t count) : radius(at::linspace(0.1, 1.0, static_cast<std::int64_t>(count))) {}
  torch::data::Example<> get(std::size_t i) override {
    const std::int64_t arm = static_cast<std::int64_t>(i) % kArms;
    const at::Tensor r = radius[static_cast<std::int64_t>(i)];
    const at::Tensor angle = r * 5.0 + 2.0944 * static_cast<double>(arm);
    return {at::stack({r * angle.cos(), r * angle.sin()}), at::scalar_tensor(arm, at::kLong)};
  }
  std::optional<std::size_t> size() const override { return radius.size(0); }
  at::Tensor radius;
};

struct ClassifierImpl : torch::nn::Module {
  ClassifierImpl() {
    hidden = register_module("hidden", torch::nn::Linear(2, 64));
    middle = register_module("middle", torch::nn::Linear(64, 64));
    arms = register_module("arms", torch::nn::Linear(64, kArms));
  }
  at::Tensor forward(const at::Tensor& points) { return arms(at::relu(middle(at::relu(hidden(points))))); }
  torch::nn::Linear hidden{nullptr}, middle{nullptr}, arms{nullptr};
};
TORCH_MODULE(Classifier);

void train() {
  at::manual_seed(1);
  auto data = Spirals(900).map(torch::data::transforms::Stack<>());
  const std::size_t count = *data.size(), batch = 60;
  auto loader = torch::data::make_data_loader(data, torch::data::samplers::RandomSampler(count), batch);
  Classifier model;
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
  for (int epoch = 1; epoch <= 15; ++epoch) {
    double sum = 0, right = 0, seen = 0;
    for (const auto& samples : *loader) {
      const at::Tensor scores = model->forward(samples.data);
      const at::Tensor loss = at::cross_entropy_loss(scores, samples.target);
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
      sum += loss.item<double>() * static_cast<double>(samples.target.size(0));
      right += scores.argmax(1).eq(samples.target).sum().item<double>();
      seen += static_cast<double>(samples.target.size(0));
    }
    std::cout << "epoch " << epoch << "  loss " << sum / seen << "  right " << right / seen << std::endl;
  }
}

int main() { train(); }
