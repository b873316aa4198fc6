#pragma once

// Names that examples in the comments of public headers use: a program's own module, data and values. They are only
// declared, since examples are compiled and not run.

#include <torch/script.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>

struct Config {};
struct GPTImpl : torch::nn::Module {
  explicit GPTImpl(const Config& config);
};
TORCH_MODULE(GPT);
struct NetImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target);
};
TORCH_MODULE(Net);

struct MyDataset : torch::data::datasets::Dataset<MyDataset> {
  torch::data::Example<> get(std::size_t index) override;
  std::optional<std::size_t> size() const override;
};
/// A type with the members of TokenBatches and of LibTorch's loaders.
struct Batches {
  tessera::SamplerCursor cursor() const;
  void resume(const tessera::SamplerCursor& cursor);
  tessera::TokenBatch next();
  tessera::TokenBatch of(std::int64_t microbatch);
  void end_step();
  void go_to_step(std::int64_t step);
  std::int64_t data_order() const;
  at::Tensor* begin();
  at::Tensor* end();
};

using Data = decltype(MyDataset().map(torch::data::transforms::Stack<>()));
using Loader = decltype(torch::data::make_data_loader(std::declval<Data>(), std::declval<tessera::RankSampler>(), 1));

extern Config config;
extern Net model;
extern tessera::Strategy strategy;
extern tessera::Topology topology;
extern tessera::Mesh mesh;
extern tessera::Engine engine;
extern tessera::StepResult result;
extern Batches batches;
extern Data data;
extern Loader loader;
extern tessera::TokenBatch batch;
extern tessera::LoadedCheckpoint loaded;
extern at::Tensor input, target, labels, loss, weight, scale;
extern double right, seen, held_out, progress;
extern bool patience_is_over, resumed;
extern int epochs, batch_size;
extern std::string folder;
inline const auto loss_of = [](const auto&...) { return at::Tensor(); };
