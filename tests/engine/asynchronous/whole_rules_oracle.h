#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "tessera/own_rules.h"
#include "tessera/strategy.h"
#include "tests/engine/asynchronous/order_oracle.h"

namespace tessera::testing {

/// Returns the options of tests of orders whose rule needs norms of parameters, matrices or whole tensors.
const std::vector<OrderOption>& whole_order_options();

/// A push to one tensor, in plain LibTorch.
struct PlainPush {
  at::Tensor weight;    ///< in the tensor's shape; updated in place
  at::Tensor gradient;  ///< in the tensor's shape, not scaled
  float scale = 1;      ///< factor of the gradient
  double lr = 0, weight_decay = 0;
  std::int64_t count = 1;  ///< number of the tensor's updates, this one included
};

/// Applies a push by a rule that needs the whole tensor. `states` are the states of the tensor; the first call makes
/// them. Matrices are made orthogonal by `orthogonalize`, and Adafactor's formula is `step_adafactor`; other tests
/// cover these two functions.
void push_whole(const OptimizerConfig& config, const OwnRules& own_rules, PlainPush push,
                std::vector<at::Tensor>& states);

}  // namespace tessera::testing
