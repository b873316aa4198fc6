#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/strategy.h"

namespace tessera::testing {

/// One residual block with odd sizes, so that shards cut tensors anywhere.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t hidden);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// Options of Tiny, a tiny language model of embedding, blocks and head. They add whatever is awkward for sharding.
struct TinyOptions {
  std::int64_t vocab = 19, width = 12, hidden = 31, blocks = 3;
  bool tied_head = false;
  bool frozen_first_block = false;
  bool unused_block = false;  ///< a block that forward never runs
  bool shared_block = false;  ///< forward runs block 0 twice
  bool recompute = false;     ///< blocks run under tessera::checkpoint
};

/// A small language model: an embedding, blocks, and a head that gives logits.
struct TinyImpl : torch::nn::Module {
  explicit TinyImpl(const TinyOptions& options);
  /// Returns the mean cross entropy (fp32) of predicting `targets` [B, T] from `tokens` [B, T].
  at::Tensor forward(const at::Tensor& tokens, const at::Tensor& targets);
  TinyOptions options;
  torch::nn::Embedding embedding{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  at::Tensor head;  ///< [vocab, width]; the embedding's own weight where tied
};
TORCH_MODULE(Tiny);

/// A batch of tokens [batch, length] and their targets; equal seeds give equal batches.
struct Batch {
  at::Tensor tokens, targets;
};
std::vector<Batch> make_batches(std::int64_t count, std::int64_t batch, std::int64_t length, std::int64_t vocab);

/// Makes the model from a fixed seed. Ranks are threads and share LibTorch's default generator: this takes a lock.
Tiny make_tiny(const TinyOptions& options, bool deferred);

/// A strategy's name, whether ranks hold one copy of the parameters together (which threads can) or private ones, and
/// whether parameters lie on disk.
struct Placed {
  Placed(ShardingStrategy kind_given, bool shared_given = false,
         bool on_disk_given = false)  // NOLINT: a strategy is one
      : kind(kind_given), shared(shared_given), on_disk(on_disk_given) {}
  ShardingStrategy kind;
  bool shared, on_disk;
};
std::string name_of(const Placed& placed);
/// Returns the error of reading parameters that an Engine under `strategy` left without memory.
std::string refusal_after(const Strategy& strategy);
/// Places the state of `strategy` as `placed` says; other offloaded state stays as it is.
void place(Strategy& strategy, const Placed& placed);

/// Returns a strategy that cuts Tiny into a root and one unit a block.
Strategy tiny_strategy(const Placed& placed, DType dtype = DType::kF32);

/// Returns the name and value of every parameter, in full, as fp32 copies.
std::vector<std::pair<std::string, at::Tensor>> values_of(const torch::nn::Module& module);

bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::testing
