#include "tests/support/small_models.h"

#include <ATen/Functions.h>
#include <torch/utils.h>

#include <cstring>
#include <filesystem>
#include <mutex>

#include "tessera/deferred_init.h"
#include "tessera/recompute.h"
#include "tests/support/nested_backward.h"

namespace tessera::testing {

using namespace torch::nn;

BlockImpl::BlockImpl(std::int64_t width, std::int64_t hidden) {
  norm = register_module("norm", LayerNorm(LayerNormOptions({width})));
  up = register_module("up", Linear(width, hidden));
  down = register_module("down", Linear(hidden, width));
}

at::Tensor BlockImpl::forward(const at::Tensor& x) { return x + down(at::gelu(up(norm(x)))); }

TinyImpl::TinyImpl(const TinyOptions& given) : options(given) {
  embedding = register_module("embedding", Embedding(options.vocab, options.width));
  blocks = register_module("blocks", ModuleList());
  for (std::int64_t i = 0; i < options.blocks + (options.unused_block ? 1 : 0); ++i) {
    blocks->push_back(Block(options.width, options.hidden));
  }
  const at::Tensor own =
      options.tied_head ? embedding->weight : at::empty({options.vocab, options.width}).normal_(0, 0.1);
  head = register_parameter("head", own);
  if (options.frozen_first_block) {
    for (auto& parameter : blocks[0]->parameters()) parameter.set_requires_grad(false);
  }
}

at::Tensor TinyImpl::forward(const at::Tensor& tokens, const at::Tensor& targets) {
  at::Tensor x = embedding(tokens);
  for (std::int64_t i = 0; i < options.blocks; ++i) {
    const auto block = std::dynamic_pointer_cast<BlockImpl>(blocks->ptr(i));
    const auto run = [block](const at::Tensor& input) { return block->forward(input); };
    // A shared block that is computed again has a separate backward for each of its two uses, so its gradients come in
    // two parts.
    const bool twice = i == 0 && options.shared_block;
    for (int k = 0; k < (twice ? 2 : 1); ++k) {
      x = !options.recompute ? run(x) : twice ? with_nested_backward(run, x) : tessera::checkpoint(run, x);
    }
  }
  const at::Tensor logits = at::linear(x, head).to(at::kFloat);
  return at::cross_entropy_loss(logits.flatten(0, 1), targets.flatten());
}

std::vector<Batch> make_batches(std::int64_t count, std::int64_t batch, std::int64_t length, std::int64_t vocab) {
  std::vector<Batch> batches;
  std::uint64_t state = 88172645463325252ull;
  for (std::int64_t i = 0; i < count; ++i) {
    at::Tensor text = at::empty({batch, length + 1}, at::kLong);
    for (std::int64_t k = 0; k < text.numel(); ++k) {
      state ^= state << 13, state ^= state >> 7, state ^= state << 17;
      text.mutable_data_ptr<std::int64_t>()[k] = static_cast<std::int64_t>(state % vocab);
    }
    batches.push_back({text.narrow(1, 0, length).contiguous(), text.narrow(1, 1, length).contiguous()});
  }
  return batches;
}

Tiny make_tiny(const TinyOptions& options, bool deferred) {
  static std::mutex generator_mutex;
  const std::lock_guard lock(generator_mutex);
  torch::manual_seed(1234);
  const auto make = [&] { return Tiny(options); };
  return deferred ? deferred_init(make) : make();
}

std::string name_of(const Placed& placed) {
  return tessera::name_of(placed.kind) + (placed.shared ? ", shared" : "") + (placed.on_disk ? ", on disk" : "");
}

std::string refusal_after(const Strategy& strategy) {
  const bool on_disk = strategy.offload.parameters.tier == Tier::kNvme;
  return std::string(on_disk ? "put on disk" : "sharded") + " by an Engine that is gone";
}

void place(Strategy& strategy, const Placed& placed) {
  strategy.strategy = placed.kind;
  strategy.host_sharing = placed.shared;
  strategy.offload.parameters = {};
  if (!placed.on_disk) return;
  strategy.offload.parameters.tier = Tier::kNvme;
  strategy.offload.paths = {std::filesystem::temp_directory_path().string()};
  strategy.offload.record_bytes = 4096;
  strategy.offload.queue_depth = 2;
}

Strategy tiny_strategy(const Placed& placed, DType dtype) {
  Strategy result;
  place(result, placed);
  result.units.classes = {"Block"};
  result.mixed_precision.param = dtype;
  if (dtype == DType::kF16) result.mixed_precision.loss_scale.initial = 1024;
  result.optimizer.lr = 1e-2;
  return result;
}

std::vector<std::pair<std::string, at::Tensor>> values_of(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> values;
  for (const auto& item : module.named_parameters()) {
    values.emplace_back(item.key(), item.value().detach().to(at::kCPU, at::kFloat).clone());
  }
  return values;
}

bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0;
}

}  // namespace tessera::testing
