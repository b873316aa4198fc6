#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Returns whether the last operator that made `loss` divided it by `number` or multiplied it by 1 / `number`, as plain
/// loops do with the number of microbatches. Engine::backward asks, to warn of a loss that is divided twice. It looks
/// at the graph and reads no value but that one number.
bool is_divided_by(const at::Tensor& loss, std::int64_t number);

}  // namespace tessera
