#pragma once

#include <c10/core/ScalarType.h>

#include <string>

#include "tessera/dtype.h"

namespace tessera {

/// Returns Tessera's name of a LibTorch element type. Throws tessera::Error (exit code 78) naming `who` for types that
/// cannot be sharded (complex, quantised, 8-bit floats).
DType dtype_of(c10::ScalarType type, const std::string& who);
c10::ScalarType scalar_type_of(DType dtype);

/// Returns whether the dtype can be trained: fp32, bf16 or fp16.
bool is_trainable(DType dtype);

}  // namespace tessera
