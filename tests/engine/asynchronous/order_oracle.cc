#include "tests/engine/asynchronous/order_oracle.h"

#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <cmath>

#include "engine/asynchronous/servers/served_part.h"
#include "sharding/partition.h"

namespace tessera::testing {
namespace {

/// Returns the square root rounded to nearest; LibTorch's root for fp32 is sometimes off by a unit in the last place.
at::Tensor exact_root(const at::Tensor& x) { return x.to(at::kDouble).sqrt().to(at::kFloat); }

}  // namespace

OrderOracle::OrderOracle(const Strategy& strategy, int ranks, TinyOptions options, int servers)
    : strategy_(strategy),
      ranks_(ranks),
      owners_(make_tiny(options, false)),
      batches_(make_batches(6, 24, 5, options.vocab)),
      losses_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) models_.push_back(make_tiny(options, false));
  std::map<std::string, std::size_t> number;
  const auto parameters_of = [](const Tiny& model) {
    std::vector<at::Tensor> list;
    for (const auto& item : model->named_parameters()) list.push_back(item.value());
    return list;
  };
  for (const auto& item : owners_->named_parameters()) number.emplace(item.key(), number.size());
  for (const Tiny& model : models_) of_.push_back(parameters_of(model));
  of_.push_back(parameters_of(owners_));
  for (const at::Tensor& parameter : of_.back()) {
    first_.push_back(at::zeros_like(parameter).flatten());
    second_.push_back(at::zeros_like(parameter).flatten());
  }
  for (const auto& unit : partition(*owners_, strategy, ranks)) {
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      const std::int64_t part = group->layout.numel() / ranks;
      for (int owner = 0; owner < (servers > 0 ? servers : ranks); ++owner) {
        const Extent cut =
            servers > 0 ? served_part(group->layout.numel(), owner, servers) : Extent{owner * part, part};
        Shard& shard = shards_[{unit->name, {group->index, owner}}];
        for (std::size_t i = 0; i < group->parameters.size(); ++i) {
          const Extent whole = group->layout.extent(i), own = intersect(whole, cut);
          if (own.numel <= 0) continue;
          shard.pieces.push_back({number.at(group->parameters[i].name), own.offset - whole.offset, own.numel});
        }
      }
    }
  }
}

void OrderOracle::compute(int rank, std::int64_t step) {
  auto& losses = losses_[static_cast<std::size_t>(rank)];
  if (static_cast<std::int64_t>(losses.size()) == step) return;
  const std::size_t microbatches = static_cast<std::size_t>(strategy_.gradient_accumulation);
  Tiny& model = models_[static_cast<std::size_t>(rank)];
  model->zero_grad();
  double loss = 0;
  for (std::size_t k = 0; k < microbatches; ++k) {
    const Batch& batch = batches_[(static_cast<std::size_t>(step - 1) * microbatches + k) % batches_.size()];
    const std::int64_t rows = batch.tokens.size(0) / ranks_;
    const at::Tensor own =
        model->forward(batch.tokens.narrow(0, rank * rows, rows), batch.targets.narrow(0, rank * rows, rows));
    own.backward();
    loss += own.item<double>() / static_cast<double>(microbatches);
  }
  losses.push_back(loss);
}

void OrderOracle::pull(const OrderLine& line, Shard& shard) {
  const at::NoGradGuard no_grad;
  shard.pulled[line.rank] = shard.version;
  for (const Piece& piece : shard.pieces) {
    at::Tensor to =
        of_[static_cast<std::size_t>(line.rank)][piece.parameter].view(-1).narrow(0, piece.begin, piece.numel);
    to.copy_(of_.back()[piece.parameter].view(-1).narrow(0, piece.begin, piece.numel));
  }
}

void OrderOracle::push(const OrderLine& line, Shard& shard) {
  compute(line.rank, line.step);
  const at::NoGradGuard no_grad;
  const AsynchronousConfig& config = strategy_.sync.asynchronous;
  const std::int64_t age = shard.version - shard.pulled[line.rank];
  const auto mean = static_cast<float>(1.0 / static_cast<double>(strategy_.gradient_accumulation));
  const float younger = config.scale == AgeScale::kInverse ? 1.0F / static_cast<float>(1 + age) : 1.0F;
  const auto lambda = static_cast<float>(config.delay_compensation.lambda);
  for (const Piece& piece : shard.pieces) {
    const at::Tensor& pulled = of_[static_cast<std::size_t>(line.rank)][piece.parameter];
    if (!pulled.grad().defined()) continue;
    const at::Tensor made = pulled.grad().contiguous().view(-1).narrow(0, piece.begin, piece.numel);
    at::Tensor gradient;
    if (lambda == 0) {
      gradient = made * (mean * younger);
    } else {
      const at::Tensor g = made * mean;
      const at::Tensor moved = of_.back()[piece.parameter].view(-1).narrow(0, piece.begin, piece.numel) -
                               pulled.view(-1).narrow(0, piece.begin, piece.numel);
      gradient = (g + g * lambda * g * moved) * younger;
    }
    update(piece.parameter, piece, gradient, ++shard.updates[piece.parameter]);
  }
  ++shard.version;
}

void OrderOracle::update(std::size_t parameter, const Piece& piece, const at::Tensor& g, std::int64_t count) {
  const OptimizerConfig& config = strategy_.optimizer;
  at::Tensor weight = of_.back()[parameter].view(-1).narrow(0, piece.begin, piece.numel);
  at::Tensor first = first_[parameter].narrow(0, piece.begin, piece.numel);
  at::Tensor second = second_[parameter].narrow(0, piece.begin, piece.numel);
  const auto lr = static_cast<float>(config.lr);
  if (config.type == OptimizerType::kSgd) {
    const auto momentum = static_cast<float>(config.momentum);
    first.copy_(count == 1 ? g : first * momentum + g);
    weight.copy_(weight - first * lr);
    return;
  }
  const double root = std::sqrt(1.0 - power_of(config.beta2, count));
  const auto step_size = static_cast<float>(static_cast<double>(lr) * root / (1.0 - power_of(config.beta1, count)));
  const auto decay = static_cast<float>(1.0 - static_cast<double>(lr) * config.weight_decay);
  first.copy_(first + (g - first) * static_cast<float>(1.0 - config.beta1));
  second.copy_(second * static_cast<float>(config.beta2) + g * g * static_cast<float>(1.0 - config.beta2));
  weight.copy_(weight * decay - first * step_size / (exact_root(second) + static_cast<float>(config.eps * root)));
}

void OrderOracle::play(const std::vector<OrderLine>& lines) {
  for (const OrderLine& line : lines) {
    Shard& shard = shards_.at({line.unit, {line.group, line.owner}});
    EXPECT_EQ(line.version, shard.version) << line.unit;
    line.is_push ? push(line, shard) : pull(line, shard);
  }
}

}  // namespace tessera::testing
