#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Returns whether the last operator that made `loss` divided it by `number` or multiplied it by 1 / `number`, as loops
/// without Tessera do with the number of microbatches. Engine::backward asks, to warn of a loss that is divided twice.
/// It looks at the graph and reads no value but that one number.
bool is_divided_by(const at::Tensor& loss, std::int64_t number);

/// Returns the factor with which the last operator that made `loss` multiplied it, if that may be a GradScaler's: a
/// power of two from 1024 to 2^24. Returns 0 otherwise. It reads the same part of the graph as is_divided_by.
double scaler_factor_of(const at::Tensor& loss);

}  // namespace tessera
