#pragma once

#include <math.h>

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// The growth of the learning rate with the global batch size (LrScheduleConfig). `base` is the batch size for which
/// optimizer.lr is meant; 0: the rate does not grow.
struct BatchScale {
  std::int64_t base = 0;
  bool by_root = false;
};

/// The rise of the rate over the first samples of a run (LrScheduleConfig::warmup_samples). If `samples` is 0, the rate
/// does not rise.
struct SampleWarmUp {
  std::int64_t samples = 0;
  double from = 0.0;
};

/// Returns the factor of a step's rate while it rises, and 1 afterwards. `seen`: samples of all earlier steps. `batch`:
/// samples of this step. If all batches are equal, a warm-up by warmup_steps over the same number of samples gives the
/// same factors, bit for bit.
TESSERA_ALWAYS_INLINE double warm_up_ratio(SampleWarmUp warm_up, std::int64_t seen, std::int64_t batch) {
  if (warm_up.samples <= 0 || seen >= warm_up.samples) return 1.0;
  const double before = static_cast<double>(seen), all = static_cast<double>(warm_up.samples);
  if (warm_up.from > 0) return warm_up.from + (1.0 - warm_up.from) * (before / all);
  const double now = static_cast<double>(batch);
  return (before + now) / (all + now);
}

/// Returns the same rate as lr_at, computed from the rate's factors. A GPU calls this function, since only the device
/// has `global_batch` early enough.
TESSERA_ALWAYS_INLINE double scaled_lr(double base_lr, BatchScale scale, std::int64_t global_batch, double ratio) {
  double peak = base_lr;
  if (scale.base > 0) {
    const double times = static_cast<double>(global_batch) / static_cast<double>(scale.base);
    peak *= scale.by_root ? sqrt(times) : times;
  }
  return peak * ratio;
}

}  // namespace tessera
