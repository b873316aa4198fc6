#pragma once

#include <cstdint>

namespace tessera {

/// Numbers that compensate a gradient g for its delay: g + lambda * g * g * (now - pulled), element by element, after a
/// Taylor expansion whose Hessian is approximated by g g (DC-ASGD with a constant lambda, arXiv 1609.08326, equation
/// 10).
struct DelayCompensation {
  const float* now;     ///< [n] values that the gradient is applied to
  const float* pulled;  ///< [n] values with which it was made
  float lambda;
};

/// Scales `gradients` [n] by `scale` and compensates them, in place. No operation is fused with another, so the bits
/// are those of plain code on every machine.
void compensate(float* gradients, std::int64_t n, float scale, const DelayCompensation& with);

}  // namespace tessera
