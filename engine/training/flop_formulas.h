#pragma once

#include <ATen/core/ivalue.h>
#include <c10/util/ArrayRef.h>

#include <cstdint>
#include <string_view>

namespace tessera {

/// The floating-point operations of one call of an operator, from its inputs in the order of its schema. A
/// multiplication and an addition count as two operations. FlopCounter is the caller.
using FlopFormula = std::int64_t (*)(c10::ArrayRef<c10::IValue> inputs);

/// Returns the formula of an operator such as "aten::mm", or null where it is not counted. It counts the same operators
/// as torch.utils.flop_counter: products of matrices, convolutions, scaled dot-product attention, and the backward of
/// these. All else (elementwise operators, norms, embeddings, products with a vector) counts as nothing.
FlopFormula flop_formula_of(std::string_view operation);

}  // namespace tessera
