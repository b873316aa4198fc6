#pragma once

#include <math.h>

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// How the rate grows with the global batch (LrScheduleConfig). `base` is the batch that optimizer.lr is for;
/// 0: the rate does not grow.
struct BatchScale {
  std::int64_t base = 0;
  bool by_root = false;
};

/// The rate that lr_at gives, from its parts. A GPU calls it, since only the device knows `global_batch` in time.
TESSERA_ALWAYS_INLINE double scaled_lr(double base_lr, BatchScale scale, std::int64_t global_batch, double ratio) {
  double peak = base_lr;
  if (scale.base > 0) {
    const double times = static_cast<double>(global_batch) / static_cast<double>(scale.base);
    peak *= scale.by_root ? sqrt(times) : times;
  }
  return peak * ratio;
}

}  // namespace tessera
