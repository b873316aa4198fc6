#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/dtype.h"

namespace tessera {

/// Returns the sum of the squares of `numel` elements of `dtype` (fp32, bf16, fp16), in fp64. The same elements give
/// the same bits on every machine.
double sum_of_squares(const std::byte* values, DType dtype, std::int64_t numel);

/// Copies `numel` elements and returns their sum_of_squares, in one pass over memory. REQUIRES: `to` and `from` do not
/// overlap.
double squared_copy(std::byte* to, const std::byte* from, DType dtype, std::int64_t numel);

}  // namespace tessera
