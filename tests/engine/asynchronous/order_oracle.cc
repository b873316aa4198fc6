#include "tests/engine/asynchronous/order_oracle.h"

#include <ATen/ops/full_like.h>
#include <ATen/ops/sign.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "engine/asynchronous/servers/served_cut.h"
#include "engine/parameters/parameter_groups.h"
#include "optim/lr_schedule.h"
#include "runtime/config/strategy_names.h"
#include "sharding/partition.h"
#include "tests/engine/asynchronous/whole_rules_oracle.h"

namespace tessera::testing {
namespace {

/// Returns the square root rounded to nearest; LibTorch's root for fp32 is sometimes off by a unit in the last place.
at::Tensor exact_root(const at::Tensor& x) { return x.to(at::kDouble).sqrt().to(at::kFloat); }

Strategy with_defaults(Strategy strategy) {
  fill_in_defaults(strategy.optimizer);
  return strategy;
}

/// Returns an Adjust that sets the rule of a strategy. The tests' rules have numbers far from the defaults.
Adjust by_rule(const OptimizerConfig& rule) {
  return [rule](Strategy& s) { s.optimizer = rule; };
}
const OptimizerConfig kWithMomentum = {.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0.0, .momentum = 0.9};

/// Returns an Adjust that sets SGD with momentum as the rule, and then makes the change `adjust`.
Adjust by_momentum(const Adjust& adjust) {
  return [adjust](Strategy& s) {
    s.optimizer = kWithMomentum;
    adjust(s);
  };
}

}  // namespace

const std::vector<OrderOption>& order_options() {
  const auto delay = [](double lambda, bool adaptive) {
    DelayCompensationConfig config{.lambda = lambda, .adaptive = adaptive};
    if (adaptive) config.decay = 0.75;
    return config;
  };
  static const std::vector<OrderOption> list = {
      {"adamw"},
      {"momentum", by_rule(kWithMomentum)},
      {"inverse", by_momentum([](Strategy& s) { s.sync.asynchronous.scale = AgeScale::kInverse; })},
      {"compensated",
       by_momentum([=](Strategy& s) { s.sync.asynchronous.delay_compensation = delay(2.0, /*adaptive=*/false); })},
      {"compensated and inverse",
       [=](Strategy& s) {
         s.sync.asynchronous.scale = AgeScale::kInverse;
         s.sync.asynchronous.delay_compensation = delay(0.5, /*adaptive=*/false);
       }},
      {"two microbatches", [](Strategy& s) { s.gradient_accumulation = 2; }},
      {"compensated adaptively",
       by_momentum([=](Strategy& s) { s.sync.asynchronous.delay_compensation = delay(0.5, /*adaptive=*/true); })},
      {"compensated adaptively, inverse, clipped",
       [=](Strategy& s) {
         s.sync.asynchronous.scale = AgeScale::kInverse;
         s.sync.asynchronous.delay_compensation = delay(0.5, /*adaptive=*/true);
         s.gradient_clipping = 0.2;
       }},
      {"clipped by the norm", by_momentum([](Strategy& s) { s.gradient_clipping = 0.2; })},
      {"clipped by value", by_momentum([](Strategy& s) { s.gradient_clipping = 0, s.gradient_clip_value = 0.005; })},
      {.name = "weights", .adjust = [](Strategy& s) { s.gradient_accumulation = 2; }, .is_weighted = true},
      {.name = "weights, clipped",
       .adjust = by_momentum([](Strategy& s) { s.gradient_clipping = 0.2, s.gradient_accumulation = 2; }),
       .is_weighted = true},
      {.name = "a skipped step", .adjust = by_rule(kWithMomentum), .skipping_rank = 1},
      {"groups", [](Strategy& s) { s.optimizer.groups = {{.max_dim = 1, .lr_ratio = 0.25, .weight_decay = 0.5}}; }},
      {"a schedule", by_momentum([](Strategy& s) { s.lr_schedule.warmup_steps = 3; })},
      {"sgd", by_rule({.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0.1})},
      {"sgd, nesterov",
       by_rule({.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0.1, .momentum = 0.9, .nesterov = true})},
      {"sgd, dampening",
       by_rule({.type = OptimizerType::kSgd, .lr = 0.1, .weight_decay = 0.1, .momentum = 0.9, .dampening = 0.25})},
      {"adam", by_rule({.type = OptimizerType::kAdam, .lr = 0.01, .beta1 = 0.8, .weight_decay = 0.1})},
      {"lion", by_rule({.type = OptimizerType::kLion, .lr = 1e-3, .weight_decay = 0.1})},
      {"adagrad", by_rule({.type = OptimizerType::kAdagrad, .lr = 0.05, .weight_decay = 0.1, .lr_decay = 0.1})},
      {"rmsprop", by_rule({.type = OptimizerType::kRmsprop, .lr = 0.01, .weight_decay = 0.1, .alpha = 0.9})},
      {"rmsprop, momentum, centered", by_rule({.type = OptimizerType::kRmsprop,
                                               .lr = 1e-3,
                                               .weight_decay = 0.1,
                                               .momentum = 0.9,
                                               .alpha = 0.9,
                                               .centered = true})},
      {"at most one step ahead", [](Strategy& s) { s.sync.asynchronous.max_staleness = 1; }},
      {"in rank order", by_momentum([](Strategy& s) { s.sync.asynchronous.max_staleness = 0; })},
      {"a tied head, frozen and unused blocks",
       nullptr,
       {.tied_head = true, .frozen_first_block = true, .unused_block = true}}};
  return list;
}

OrderOracle::OrderOracle(const Strategy& strategy, int ranks, const OrderOption& option, int servers)
    : strategy_(with_defaults(strategy)),
      option_(option),
      ranks_(ranks),
      owners_(make_tiny(option.model, false)),
      rates_(static_cast<std::size_t>(ranks)),
      batches_(make_batches(6, 24, 5, option.model.vocab)),
      losses_(static_cast<std::size_t>(ranks)) {
  for (int rank = 0; rank < ranks; ++rank) models_.push_back(make_tiny(option.model, false));
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
    for (auto* const list : {&first_, &second_, &third_, &mean_squares_})
      list->push_back(at::zeros_like(parameter).flatten());
  }
  whole_.resize(of_.back().size());
  const OptimizerConfig& optimizer = strategy.optimizer;
  const auto units = partition(*owners_, strategy, ranks, nullptr, matrices_of(optimizer));
  std::vector<ServedCut::Group> sizes;
  for_each_trainable(units, [&](const FlatGroup& group) {
    sizes.push_back({group.layout.numel(), is_served_whole(optimizer.type, !group.matrices.empty())});
  });
  const ServedCut served(sizes, std::max(servers, 1), /*pieces=*/1);
  std::size_t index = 0;
  for_each_trainable(units, [&](const FlatGroup& group) {
    const std::int64_t numel = group.layout.numel(), part = numel / ranks;
    const bool is_whole = sizes[index].is_whole;
    for (int owner = 0; owner < (servers > 0 ? servers : ranks); ++owner) {
      const Extent by_rank = is_whole ? Extent{0, owner == 0 ? numel : 0} : Extent{owner * part, part};
      const Extent cut = servers > 0 ? served.shard(index, owner, /*piece=*/0) : by_rank;
      Shard& shard = shards_[{group.unit->name, {group.index, owner}}];
      shard.is_whole = is_whole;
      for (std::size_t i = 0; i < group.parameters.size(); ++i) {
        const Extent whole = group.layout.extent(i), own = intersect(whole, cut);
        if (own.numel <= 0) continue;
        shard.pieces.push_back({number.at(group.parameters[i].name), own.offset - whole.offset, own.numel});
      }
    }
    ++index;
  });
}

void OrderOracle::compute(int rank, std::int64_t step) {
  auto& losses = losses_[static_cast<std::size_t>(rank)];
  if (static_cast<std::int64_t>(losses.size()) == step) return;
  while (static_cast<std::int64_t>(losses.size()) + 1 < step) losses.push_back(std::numeric_limits<double>::infinity());
  const std::size_t microbatches = static_cast<std::size_t>(strategy_.gradient_accumulation);
  Tiny& model = models_[static_cast<std::size_t>(rank)];
  model->zero_grad();
  double loss = 0, weights = 0;
  for (std::size_t k = 0; k < microbatches; ++k) {
    const std::size_t microbatch = static_cast<std::size_t>(step - 1) * microbatches + k;
    const Batch& batch = batches_[microbatch % batches_.size()];
    const std::int64_t rows = batch.tokens.size(0) / ranks_;
    const at::Tensor own =
        model->forward(batch.tokens.narrow(0, rank * rows, rows), batch.targets.narrow(0, rank * rows, rows));
    const double weight = option_.is_weighted ? weight_of(rank, microbatch) : 1.0;
    own.backward(at::full_like(own, weight));
    loss += weight * own.item<double>() / static_cast<double>(microbatches);
    weights += weight;
  }
  losses.push_back(loss * (static_cast<double>(microbatches) / weights));

  double squares = 0;
  std::set<const void*> seen;  // a tied parameter has two names
  for (const at::Tensor& parameter : of_[static_cast<std::size_t>(rank)]) {
    if (!parameter.grad().defined() || !seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    squares += parameter.grad().to(at::kDouble).square().sum().item<double>();
  }
  const double most = strategy_.gradient_clipping, norm = std::sqrt(squares) / weights;
  const double clip = most > 0 ? std::min(1.0, most / (norm + 1e-6)) : 1.0;
  if (clip < 1) ++clipped_;
  Rates& rates = rates_[static_cast<std::size_t>(rank)];
  rates.scale = static_cast<float>(1.0 / weights * clip);
  rates.lr = lr_at(strategy_.lr_schedule, strategy_.optimizer.lr, rates.applied++, /*global_batch=*/0);
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
  const Rates& with = rates_[static_cast<std::size_t>(line.rank)];
  const std::int64_t age = shard.version - shard.pulled[line.rank];
  const float younger = config.scale == AgeScale::kInverse ? 1.0F / static_cast<float>(1 + age) : 1.0F;
  const auto most = static_cast<float>(strategy_.gradient_clip_value);
  for (const Piece& piece : shard.pieces) {
    const at::Tensor& pulled = of_[static_cast<std::size_t>(line.rank)][piece.parameter];
    if (!pulled.grad().defined()) continue;
    const auto cut = [&](const at::Tensor& whole) { return whole.view(-1).narrow(0, piece.begin, piece.numel); };
    const at::Tensor made = cut(pulled.grad().contiguous());
    const bool is_plain = config.delay_compensation.lambda == 0;
    const at::Tensor unscaled = is_plain ? made : compensated(piece, made * with.scale, cut(pulled));
    const float scale = is_plain ? with.scale * younger : younger;
    if (shard.is_whole) {
      const at::Tensor& weight = of_.back()[piece.parameter];
      const auto [lr, weight_decay] = numbers_of(piece.parameter, with.lr);
      push_whole(strategy_.optimizer, option_.own_rules,
                 {weight, unscaled.view_as(weight), scale, lr, weight_decay, ++shard.updates[piece.parameter]},
                 whole_[piece.parameter]);
      continue;
    }
    at::Tensor gradient = unscaled * scale;
    if (most > 0) {
      if ((gradient.abs() > most).any().item<bool>()) ++clipped_;
      gradient = gradient.clamp(-most, most);
    }
    update(piece, gradient, ++shard.updates[piece.parameter], with.lr);
  }
  ++shard.version;
}

at::Tensor OrderOracle::compensated(const Piece& piece, const at::Tensor& g, const at::Tensor& pulled) {
  const DelayCompensationConfig& delay = strategy_.sync.asynchronous.delay_compensation;
  at::Tensor lambda = at::full_like(g, static_cast<float>(delay.lambda));
  if (delay.adaptive) {
    at::Tensor mean = mean_squares_[piece.parameter].narrow(0, piece.begin, piece.numel);
    mean.copy_(mean * static_cast<float>(delay.decay) + g * g * static_cast<float>(1.0 - delay.decay));
    lambda = lambda / exact_root(mean + 1e-7F);
  }
  const at::Tensor now = of_.back()[piece.parameter].view(-1).narrow(0, piece.begin, piece.numel);
  return g + lambda * g * g * (now - pulled);
}

std::pair<double, double> OrderOracle::numbers_of(std::size_t parameter, double everybodys) const {
  double weight_decay = strategy_.optimizer.weight_decay;
  for (const ParameterGroup& group : strategy_.optimizer.groups) {  // the options select groups by max_dim alone
    if (of_.back()[parameter].dim() > group.max_dim.value_or(0)) continue;
    everybodys *= group.lr_ratio;
    weight_decay = group.weight_decay.value_or(weight_decay);
  }
  return {everybodys, weight_decay};
}

/// The formulas are those of optim/rules. `everybodys` is the learning rate of parameters in no group.
void OrderOracle::update(const Piece& piece, at::Tensor g, std::int64_t count, double everybodys) {
  const OptimizerConfig& config = strategy_.optimizer;
  const auto cut = [&](const at::Tensor& whole) { return whole.narrow(0, piece.begin, piece.numel); };
  const at::Tensor weight = cut(of_.back()[piece.parameter].view(-1));
  const at::Tensor first = cut(first_[piece.parameter]), second = cut(second_[piece.parameter]),
                   third = cut(third_[piece.parameter]);
  const auto [rate, weight_decay] = numbers_of(piece.parameter, everybodys);
  const auto lr = static_cast<float>(rate), l2 = static_cast<float>(weight_decay);
  const auto decay = static_cast<float>(1.0 - static_cast<double>(lr) * weight_decay);
  const auto momentum = static_cast<float>(config.momentum), eps = static_cast<float>(config.eps);
  // Rules of matrices leave all else to adamw.
  const OptimizerType type = updates_whole_tensors(config.type) ? OptimizerType::kAdamW : config.type;
  const bool is_decoupled = type == OptimizerType::kAdamW || type == OptimizerType::kLion;
  if (!is_decoupled) g = g + weight * l2;
  switch (type) {
    case OptimizerType::kSgd: {
      if (momentum == 0) {
        weight.copy_(weight - g * lr);
        return;
      }
      first.copy_(count == 1 ? g : first * momentum + g * static_cast<float>(1.0 - config.dampening));
      weight.copy_(weight - (config.nesterov ? g + first * momentum : first) * lr);
      return;
    }
    case OptimizerType::kLion: {
      const at::Tensor to = g - first;
      const at::Tensor direction = first + to * static_cast<float>(1.0 - config.beta1);
      weight.copy_(weight * decay - at::sign(direction) * lr);
      first.copy_(first + to * static_cast<float>(1.0 - config.beta2));
      return;
    }
    case OptimizerType::kAdagrad: {
      const auto later =
          static_cast<float>(static_cast<double>(lr) / (1.0 + static_cast<double>(count - 1) * config.lr_decay));
      first.copy_(first + g * g);
      weight.copy_(weight - g * later / (exact_root(first) + eps));
      return;
    }
    case OptimizerType::kRmsprop: {
      const auto share = static_cast<float>(1.0 - config.alpha);
      first.copy_(first * static_cast<float>(config.alpha) + g * g * share);
      at::Tensor spread = first;
      if (config.centered) {
        third.copy_(third + (g - third) * share);
        spread = (first - third * third).clamp_min(0.0);
      }
      const at::Tensor root = exact_root(spread) + eps;
      if (momentum == 0) {
        weight.copy_(weight - g * lr / root);
        return;
      }
      second.copy_(second * momentum + g / root);
      weight.copy_(weight - second * lr);
      return;
    }
    case OptimizerType::kAdam:
    case OptimizerType::kAdamW: {
      const double root = std::sqrt(1.0 - power_of(config.beta2, count));
      const auto step_size = static_cast<float>(static_cast<double>(lr) * root / (1.0 - power_of(config.beta1, count)));
      const at::Tensor decayed = is_decoupled ? weight * decay : weight;
      first.copy_(first + (g - first) * static_cast<float>(1.0 - config.beta1));
      second.copy_(second * static_cast<float>(config.beta2) + g * g * static_cast<float>(1.0 - config.beta2));
      weight.copy_(decayed - first * step_size / (exact_root(second) + static_cast<float>(config.eps * root)));
      return;
    }
    default:
      FAIL() << "the oracle has no such rule: " << name_of(config.type);
  }
}

void OrderOracle::play(const std::vector<OrderLine>& lines) {
  for (const OrderLine& line : lines) {
    Shard& shard = shards_.at({line.unit, {line.group, line.owner}});
    EXPECT_EQ(line.version, shard.version) << line.unit;
    line.is_push ? push(line, shard) : pull(line, shard);
  }
}

}  // namespace tessera::testing
