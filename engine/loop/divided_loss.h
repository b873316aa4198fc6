#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace tessera {

/// Whether the last operator that made `loss` divided it by `number`, or multiplied it by 1 / `number`, as plain loops do with the number of
/// microbatches. Asks the graph; reads no values but that one number's.
bool is_divided_by(const at::Tensor& loss, std::int64_t number);

}  // namespace tessera
