#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// The rate that lr_at gives, from its parts. A GPU calls it, since only the device knows `global_batch` in time.
TESSERA_ALWAYS_INLINE double scaled_lr(double base_lr, std::int64_t base_batch_size, std::int64_t global_batch,
                                       double ratio) {
  double peak = base_lr;
  if (base_batch_size > 0) peak *= static_cast<double>(global_batch) / static_cast<double>(base_batch_size);
  return peak * ratio;
}

}  // namespace tessera
