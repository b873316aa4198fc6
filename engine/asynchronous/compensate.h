#pragma once

#include <cstdint>

namespace tessera {

/// Numbers that compensate a gradient g for its delay (DC-ASGD, arXiv 1609.08326, equation 10). The compensated
/// gradient is g + lambda * g * g * (now - pulled), element by element. It is a Taylor expansion with g * g in place of
/// the Hessian.
struct DelayCompensation {
  const float* now;     ///< [n] values that the gradient is applied to
  const float* pulled;  ///< [n] values with which the gradient was made
  float lambda;
};

/// The running mean that makes lambda adaptive (DC-ASGD-a, arXiv 1609.08326, section 5).
struct MeanSquares {
  float* mean;            ///< [n] the running mean of g * g; 0 before the first update
  float kept, new_share;  ///< shares of the old mean and of the new g * g; their sum is 1
};

/// The epsilon of arXiv 1609.08326, which is added to a mean square.
constexpr float kMeanSquareEpsilon = 1e-7F;

/// Scales `gradients` [n] by `scale` and compensates them for their delay, in place. No operation is fused with
/// another, so the results have the same bits on every machine.
void compensate(float* gradients, std::int64_t n, float scale, const DelayCompensation& with);

/// Compensates as `compensate` does, but with lambda / sqrt(mean + kMeanSquareEpsilon) in place of lambda. The mean is
/// updated before it is used.
void compensate_adaptively(float* gradients, std::int64_t n, float scale, const DelayCompensation& with,
                           const MeanSquares& squares);

}  // namespace tessera
