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

/// A residual block with odd sizes, so that shards divide tensors at any place.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t hidden);
  at::Tensor forward(const at::Tensor& x);
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

/// Options of Tiny, a tiny language model with an embedding, blocks and a head. The options add things that are
/// difficult to shard.
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
  at::Tensor head;  ///< [vocab, width]; the weight of the embedding if tied
};
TORCH_MODULE(Tiny);

/// A batch of tokens [batch, length] and their targets. Equal seeds give equal batches.
struct Batch {
  at::Tensor tokens, targets;
};
std::vector<Batch> make_batches(std::int64_t count, std::int64_t batch, std::int64_t length, std::int64_t vocab);

/// Makes the model from a fixed seed. Ranks are threads and share LibTorch's default generator, so this function takes
/// a lock.
Tiny make_tiny(const TinyOptions& options, bool deferred);

/// A ShardingStrategy, whether parameters lie on disk, and whether ranks share one copy of the parameters (which
/// threads can) or have private copies.
struct Placed {
  Placed(ShardingStrategy kind_given, bool shared_given = false,
         bool on_disk_given = false)  // NOLINT: a strategy alone is a Placed
      : kind(kind_given), shared(shared_given), on_disk(on_disk_given) {}
  ShardingStrategy kind;
  bool shared, on_disk;
};
std::string name_of(const Placed& placed);
/// Returns the error that occurs if code reads parameters that an Engine under `strategy` left without memory.
std::string refusal_after(const Strategy& strategy);
/// Sets the sharding, the sharing inside a host and the tier of the parameters in `strategy` as `placed` has them. The
/// tiers of other state stay the same.
void place(Strategy& strategy, const Placed& placed);

/// Returns a strategy that divides Tiny into a root and one unit per block.
Strategy tiny_strategy(const Placed& placed, DType dtype = DType::kF32);

/// Returns the names and complete values of all parameters, as fp32 copies.
std::vector<std::pair<std::string, at::Tensor>> values_of(const torch::nn::Module& module);

bool same_bits(const at::Tensor& a, const at::Tensor& b);

}  // namespace tessera::testing
