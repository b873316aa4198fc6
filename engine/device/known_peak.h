#pragma once

// See docs/glossary.md: unit.

#include <string_view>

#include "tessera/dtype.h"

namespace tessera {

/// Returns the peak of a GPU's matrix units in TFLOP/s, dense, for products of `dtype`, as its maker's data sheet says;
/// 0 where it is not known. `name`: the name of the device, such as "NVIDIA H200". fp32 means products in fp32, as
/// LibTorch makes them by default, not TF32.
double known_peak_tflops(std::string_view name, DType dtype);

}  // namespace tessera
