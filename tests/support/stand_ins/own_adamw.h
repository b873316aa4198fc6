#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/sqrt.h>

#include <cmath>
#include <string>
#include <vector>

#include "tessera/elementwise_optimizer.h"

namespace tessera::testing {

/// AdamW as a user writes it.
struct OwnAdamW final : ElementwiseOptimizer {
  std::vector<std::string> states() const override { return {"first", "second"}; }
  void update(Elements& e) const override {
    at::Tensor &first = e.states[0], &second = e.states[1];
    first.mul_(0.9).add_(e.gradient, 0.1);
    second.mul_(0.999).addcmul_(e.gradient, e.gradient, 0.001);
    const double root = std::sqrt(1 - std::pow(0.999, e.step)), rate = e.lr / (1 - std::pow(0.9, e.step));
    // MKL's square roots of floats differ between makers of processors. Those of doubles, rounded to floats, do not.
    const at::Tensor spread = second.to(at::kDouble).sqrt().to(at::kFloat);
    e.parameters.mul_(1 - e.lr * e.weight_decay).sub_(first / (spread / root + 1e-3), rate);
  }
};

}  // namespace tessera::testing
