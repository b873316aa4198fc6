#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/mm.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "tessera/matrix_optimizer.h"

namespace tessera::testing {

/// Muon as a user writes it.
struct OwnMuon final : MatrixOptimizer {
  std::vector<State> states(std::int64_t rows, std::int64_t columns) const override {
    return {{"momentum", {rows, columns}}};
  }
  void update(Matrix& m) const override {
    m.states[0].lerp_(m.gradient, 1 - 0.95);
    at::Tensor x = m.gradient.lerp(m.states[0], 0.95);
    const bool is_tall = x.size(0) > x.size(1);
    if (is_tall) x = x.t();
    x = x / x.norm().clamp_min(1e-7);
    for (int i = 0; i < 5; ++i) {
      const at::Tensor gram = x.mm(x.t());
      x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram.mm(gram)).mm(x);
    }
    const double longer = static_cast<double>(std::max(x.size(0), x.size(1)));
    m.parameter = m.parameter * (1 - m.lr * m.weight_decay) - 0.2 * std::sqrt(longer) * m.lr * (is_tall ? x.t() : x);
  }
};

}  // namespace tessera::testing
