#pragma once

#include <cstdint>
#include <string_view>

#include "optim/optimizer.h"

namespace tessera {

/// Throws `std::invalid_argument` that names the optimizer, the span, the wanted and the given length, unless every
/// span of the slice has the length that an optimizer with `num_states` states needs, and the dtype is a float type
/// that the loops can round to (fp32, bf16, fp16). A mismatch is a bug of the caller; checking costs nothing beside
/// the loop, and writing past a shard would corrupt a neighbour silently.
void check_slice(std::string_view optimizer, int num_states, const OptimizerSlice& slice);

/// base^exponent by repeated squaring. Unlike `std::pow`, whose last bit depends on the processor that libm detects,
/// it gives the same bits on every machine, so ranks on different hosts agree on bias corrections.
double power(double base, std::int64_t exponent);

}  // namespace tessera
