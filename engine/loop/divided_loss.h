#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Returns whether the last operator of `loss` divided by `number`, or multiplied by 1 / `number`. Loops without
/// Tessera divide the loss by the number of microbatches in this way. Engine::backward calls it to warn of a loss that
/// is divided twice. The function looks at the graph, and reads no value except the operator's number.
bool is_divided_by(const at::Tensor& loss, std::int64_t number);

/// Returns the factor by which the last operator of `loss` multiplied, if a GradScaler may have set it: a power of two
/// from 1024 to 2^24. Returns 0 otherwise. It reads the same part of the graph as is_divided_by.
double scaler_factor_of(const at::Tensor& loss);

}  // namespace tessera
