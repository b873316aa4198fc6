#include "tests/engine/asynchronous/whole_rules_oracle.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <span>

#include "engine/step/rules/orthogonalize.h"
#include "optim/adafactor.h"
#include "sharding/layout/matrix_deal.h"
#include "tessera/matrix_optimizer.h"

namespace tessera::testing {
namespace whole_rules_oracle {

at::Tensor exact_root(const at::Tensor& x) { return x.to(at::kDouble).sqrt().to(at::kFloat); }

double norm_of(const at::Tensor& x) { return std::sqrt(x.to(at::kDouble).square().sum().item<double>()); }

std::span<float> floats_of(at::Tensor x) { return {x.data_ptr<float>(), static_cast<std::size_t>(x.numel())}; }

Adjust by(const OptimizerConfig& rule, const Adjust& adjust = nullptr) {
  return [=](Strategy& s) {
    s.optimizer = rule;
    if (adjust) adjust(s);
  };
}

/// A program's rule whose steps depend on a norm of the whole matrix. It keeps a running mean, and a number.
class NormedMatrix final : public MatrixOptimizer {
 public:
  std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
    return {{"mean", {rows, columns}}, {"largest", {1}}};
  }
  void update(Matrix& m) const override {
    m.states[0].mul_(0.75).add_(m.gradient);
    m.states[1].copy_(m.states[1].maximum(m.states[0].abs().max().reshape({1})));
    m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.states[0] / (1 + m.states[1]), m.lr);
  }
};

void push_lamb(const OptimizerConfig& config, PlainPush& p, const at::Tensor& g, std::vector<at::Tensor>& states) {
  const double root = std::sqrt(1.0 - power_of(config.beta2, p.count));
  const auto step_size = static_cast<float>(root / (1.0 - power_of(config.beta1, p.count)));
  const auto eps = static_cast<float>(config.eps * root);
  at::Tensor &first = states[0], &second = states[1];
  first.copy_(first + (g - first) * static_cast<float>(1.0 - config.beta1));
  second.copy_(second * static_cast<float>(config.beta2) + g * g * static_cast<float>(1.0 - config.beta2));
  const at::Tensor direction =
      first * step_size / (exact_root(second) + eps) + p.weight * static_cast<float>(p.weight_decay);
  const double weights = norm_of(p.weight), update = norm_of(direction);
  auto lr = static_cast<float>(p.lr);
  if (weights > 0 && update > 0) lr = static_cast<float>(lr * (weights / update));
  p.weight.copy_(p.weight - direction * lr);
}

void push_lars(const OptimizerConfig& config, PlainPush& p, const at::Tensor& g, std::vector<at::Tensor>& states) {
  const double weights = norm_of(p.weight), update = norm_of(p.gradient) * p.scale;
  auto lr = static_cast<float>(p.lr);
  if (weights > 0 && update > 0) {
    const double eps = config.eps;
    lr = static_cast<float>(lr * (config.trust_coefficient * weights / (update + p.weight_decay * weights + eps)));
  }
  const at::Tensor share = (g + p.weight * static_cast<float>(p.weight_decay)) * lr;
  states[0].copy_(states[0] * static_cast<float>(config.momentum) + share);
  p.weight.copy_(p.weight - states[0]);
}

void push_muon(const OptimizerConfig& config, PlainPush& p, const at::Tensor& g, std::vector<at::Tensor>& states) {
  const MuonConfig& muon = config.muon;
  at::Tensor& mean = states[0];
  mean.copy_(mean + (g - mean) * static_cast<float>(1.0 - muon.momentum));
  at::Tensor direction = muon.nesterov ? g + (mean - g) * static_cast<float>(muon.momentum) : mean.clone();
  const MatrixShape shape{g.size(0), g.size(1)};
  const std::int64_t shorter = std::min(shape.rows, shape.columns);
  const at::Tensor work =
      at::empty({2 * MatrixDeal::in_whole_lines(g.numel()) + 2 * MatrixDeal::in_whole_lines(shorter * shorter)});
  orthogonalize(direction.data_ptr<float>(), shape, muon.ns_steps, floats_of(work), muon.ns_dtype);
  const auto rows = static_cast<double>(shape.rows), columns = static_cast<double>(shape.columns);
  const double factor = muon.adjust_lr == MuonLrAdjustment::kOriginal ? std::sqrt(std::max(1.0, rows / columns))
                                                                      : 0.2 * std::sqrt(std::max(rows, columns));
  direction.mul_(static_cast<float>(factor));
  const auto lr = static_cast<float>(p.lr);
  const auto decay = static_cast<float>(1.0 - static_cast<double>(lr) * p.weight_decay);
  p.weight.copy_(p.weight * decay - direction * lr);
}

void push_adafactor(const OptimizerConfig& config, PlainPush& p, const at::Tensor& g, std::vector<at::Tensor>& states) {
  AdafactorTensor t;
  t.parameter = floats_of(p.weight);
  t.gradient = floats_of(g);
  t.columns = g.numel();
  if (g.dim() < 2) {
    t.variance = floats_of(states[0]);
  } else {
    t.rows = g.size(-2);
    t.columns = g.size(-1);
    t.matrices = g.numel() / (t.rows * t.columns);
    t.row_var = floats_of(states[0]).first(static_cast<std::size_t>(t.matrices * t.rows));
    t.col_var = floats_of(states[1]).first(static_cast<std::size_t>(t.matrices * t.columns));
  }
  step_adafactor(config.adafactor, {p.lr, p.weight_decay, p.count}, t);
}

}  // namespace whole_rules_oracle

const std::vector<OrderOption>& whole_order_options() {
  using namespace whole_rules_oracle;
  const OptimizerConfig lamb = {.type = OptimizerType::kLamb, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1};
  const OptimizerConfig lars = {
      .type = OptimizerType::kLars, .lr = 0.5, .weight_decay = 0.1, .momentum = 0.9, .trust_coefficient = 0.02};
  const OptimizerConfig muon = {.type = OptimizerType::kMuon, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1};
  const OptimizerConfig adafactor = {.type = OptimizerType::kAdafactor, .lr = 1e-1, .weight_decay = 0.1};
  const Adjust old = [](Strategy& s) {
    s.sync.asynchronous.scale = AgeScale::kInverse;
    s.sync.asynchronous.delay_compensation = {.lambda = 0.5, .adaptive = true, .decay = 0.75};
  };
  const Adjust compensated = [](Strategy& s) { s.sync.asynchronous.delay_compensation = {.lambda = 2.0}; };
  const Adjust clipped = [](Strategy& s) { s.gradient_clipping = 0.2; };
  static const std::vector<OrderOption> list = {
      {"lamb", by(lamb)},
      {"lamb, groups",
       by(lamb, [](Strategy& s) { s.optimizer.groups = {{.max_dim = 1, .lr_ratio = 0.25, .weight_decay = 0.5}}; })},
      {"lamb, compensated adaptively, inverse", by(lamb, old)},
      {"lars, clipped by the norm", by(lars, clipped)},
      {"lars, compensated", by(lars, compensated)},
      {"muon", by(muon)},
      {"muon, compensated adaptively, inverse", by(muon, old)},
      {"muon, at most one step ahead", by(muon, [](Strategy& s) { s.sync.asynchronous.max_staleness = 1; })},
      {"adafactor", by(adafactor)},
      {"adafactor, compensated adaptively, inverse", by(adafactor, old)},
      {.name = "adafactor, a tied head, frozen and unused blocks",
       .adjust = by(adafactor),
       .model = {.tied_head = true, .frozen_first_block = true, .unused_block = true}},
      {.name = "a program's rule of matrices",
       .adjust = by({.type = OptimizerType::kOwnMatrix, .lr = 1e-2, .eps = 1e-3, .weight_decay = 0.1}, clipped),
       .own_rules = OwnRules::of(std::make_shared<NormedMatrix>())}};
  return list;
}

void push_whole(const OptimizerConfig& config, const OwnRules& own_rules, PlainPush push,
                std::vector<at::Tensor>& states) {
  using namespace whole_rules_oracle;
  if (config.type == OptimizerType::kOwnMatrix) {
    if (states.empty()) {
      for (const auto& state : own_rules.matrices->states(push.weight.size(0), push.weight.size(1)))
        states.push_back(at::zeros(state.sizes));
    }
    MatrixOptimizer::Matrix m;
    m.parameter = push.weight;
    m.gradient = push.gradient * push.scale;
    m.states = states;
    m.lr = push.lr;
    m.weight_decay = push.weight_decay;
    m.step = push.count;
    return own_rules.matrices->update(m);
  }
  if (states.empty()) states = {at::zeros_like(push.weight), at::zeros_like(push.weight)};
  const at::Tensor g = push.gradient * push.scale;
  switch (config.type) {
    case OptimizerType::kLamb:
      return push_lamb(config, push, g, states);
    case OptimizerType::kLars:
      return push_lars(config, push, g, states);
    case OptimizerType::kMuon:
      return push_muon(config, push, g, states);
    case OptimizerType::kAdafactor:
      return push_adafactor(config, push, g, states);
    default:
      FAIL() << "the oracle has no such rule of whole tensors: " << name_of(config.type);
  }
}

}  // namespace tessera::testing
