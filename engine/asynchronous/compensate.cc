#include "engine/asynchronous/compensate.h"

#include <cmath>

namespace tessera {

void compensate(float* gradients, std::int64_t n, float scale, const DelayCompensation& with) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = gradients[i] * scale;
    const float moved = with.now[i] - with.pulled[i];
    gradients[i] = g + with.lambda * g * g * moved;
  }
}

void compensate_adaptively(float* gradients, std::int64_t n, float scale, const DelayCompensation& with,
                           const MeanSquares& squares) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = gradients[i] * scale;
    const float moved = with.now[i] - with.pulled[i];
    squares.mean[i] = squares.kept * squares.mean[i] + squares.new_share * (g * g);
    const float lambda = with.lambda / std::sqrt(squares.mean[i] + kMeanSquareEpsilon);
    gradients[i] = g + lambda * g * g * moved;
  }
}

}  // namespace tessera
