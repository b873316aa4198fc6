#include "runtime/comm/sum/momentum.h"

#include "runtime/comm/sum/cpu_clones.h"

namespace tessera {

TESSERA_CPU_CLONES void add_momentum(float momentum, const float* values, std::size_t numel, float* moving,
                                     float* sum) {
  for (std::size_t i = 0; i < numel; ++i) {
    const float moved = momentum * moving[i] + values[i];
    moving[i] = moved;
    sum[i] += moved;
  }
}

TESSERA_CPU_CLONES void make_momentum(float decay, float rate, const float* moving, std::size_t numel, float* values) {
  for (std::size_t i = 0; i < numel; ++i) values[i] = decay * moving[i] + rate * values[i];
}

TESSERA_CPU_CLONES void unmake_momentum(float decay, float rate, int ranks, std::size_t numel, float* share,
                                        float* values) {
  const auto parts = static_cast<float>(ranks);
  const float decay_of_all = decay * parts, per_rate = 1.0f / rate, per_rank = 1.0f / parts;
  for (std::size_t i = 0; i < numel; ++i) {
    const float sum = values[i];
    values[i] = (sum - decay_of_all * share[i]) * per_rate;
    share[i] = sum * per_rank;
  }
}

}  // namespace tessera
