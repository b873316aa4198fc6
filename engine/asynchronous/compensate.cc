#include "engine/asynchronous/compensate.h"

namespace tessera {

void compensate(float* gradients, std::int64_t n, float scale, const DelayCompensation& with) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = gradients[i] * scale;
    const float moved = with.now[i] - with.pulled[i];
    gradients[i] = g + with.lambda * g * g * moved;
  }
}

}  // namespace tessera
