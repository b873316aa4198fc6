// Trains a convolutional network whose batch norms use the samples of all ranks. The network finds the direction of
// stripes.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <tessera/rank_sampler.h>
#include <tessera/sync_batch_norm.h>
#include <tessera/tessera.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/datasets/map.h>
#include <torch/data/transforms/stack.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <iostream>

constexpr std::int64_t kDirections = 4, kSize = 12;

// Noisy stripes: images [1, 12, 12] with stripes in one of four directions.
struct Stripes : torch::data::datasets::Dataset<Stripes> {
  Stripes(std::int64_t count, std::uint64_t seed) : noise(at::empty({count, 1, kSize, kSize})) {
    noise.normal_(0, 0.7, at::make_generator<at::CPUGeneratorImpl>(seed));
  }
  torch::data::Example<> get(std::size_t i) override {
    const std::int64_t direction = static_cast<std::int64_t>(i) % kDirections;
    const double angle = 3.14159 * static_cast<double>(direction) / kDirections;
    const at::Tensor steps = at::arange(kSize, at::kFloat);
    const at::Tensor along = steps.unsqueeze(1) * std::cos(angle) + steps * std::sin(angle);
    return {at::sin(along * 1.5) + noise[static_cast<std::int64_t>(i)], at::scalar_tensor(direction, at::kLong)};
  }
  std::optional<std::size_t> size() const override { return noise.size(0); }
  at::Tensor noise;
};

struct CNNImpl : torch::nn::Module {
  CNNImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 8, 3).padding(1).bias(false)));
    norm1 = register_module("norm1", torch::nn::BatchNorm2d(8));
    conv2 = register_module("conv2", torch::nn::Conv2d(torch::nn::Conv2dOptions(8, 16, 3).stride(2).bias(false)));
    norm2 = register_module("norm2", torch::nn::BatchNorm2d(16));
    head = register_module("head", torch::nn::Linear(16, kDirections));
  }
  at::Tensor forward(const at::Tensor& images) {
    const at::Tensor x = at::relu(norm2(conv2(at::relu(norm1(conv1(images))))));
    return head(x.amax({2, 3}));
  }
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::BatchNorm2d norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(CNN);

int main() {
  return tessera::run([] {
    auto strategy = tessera::Strategy::from_json(R"({"strategy": "FULL_SHARD", "optimizer": {"lr": 1e-2}})");
    tessera::Mesh mesh = tessera::init(strategy);
    at::manual_seed(1);
    auto loader_of = [&](std::int64_t count, std::uint64_t seed) {
      return torch::data::make_data_loader(Stripes(count, seed).map(torch::data::transforms::Stack<>()),
                                           tessera::RankSampler(static_cast<std::size_t>(count), mesh),
                                           static_cast<std::size_t>(24 / mesh.world_size()));
    };
    auto training = loader_of(480, 1), held_out = loader_of(120, 2);
    CNN model;
    tessera::convert_sync_batchnorm(model, mesh);
    tessera::Engine engine(model, strategy, mesh);
    for (int epoch = 1; epoch <= 4; ++epoch) {
      double loss = 0;
      model->train();
      for (const auto& batch : *training) {
        engine.backward(at::cross_entropy_loss(model->forward(batch.data), batch.target));
        loss = engine.step().loss;
      }
      model->eval();
      const at::NoGradGuard no_grad;
      std::int64_t right = 0, seen = 0;
      for (const auto& batch : *held_out) {
        right += model->forward(batch.data).argmax(1).eq(batch.target).sum().item<std::int64_t>();
        seen += batch.target.size(0);
      }
      const double accuracy =
          tessera::mean_over_ranks(mesh, static_cast<double>(right) / static_cast<double>(seen), seen);
      if (mesh.is_main()) std::cout << "epoch " << epoch << "  loss " << loss << "  right " << accuracy << std::endl;
    }
  });
}
