#pragma once

#include <cstdint>

#include "runtime/base/noise.h"

namespace tessera {

/// The random numbers that a GradientMethod draws for one group. Each reduction has a separate key, made from the seed,
/// the group, the step, and the number of earlier reductions in the step. So a run draws the same numbers again, even
/// if it continues from a checkpoint of the same kNoiseVersion.
class DrawStream {
 public:
  /// `group` is the number of the group's first parameter. `of_rank` is the rank if each rank draws separately;
  /// otherwise it is -1.
  DrawStream(std::int64_t seed, std::int64_t group, std::int64_t of_rank)
      : stream_(mix_bits(mix_bits(mix_bits(static_cast<std::uint64_t>(seed) + 1) + static_cast<std::uint64_t>(group)) +
                         static_cast<std::uint64_t>(of_rank + 1))) {}

  void begin_step(std::int64_t step) {
    if (step != step_) reductions_ = 0;
    step_ = step;
  }
  NoiseKey next() { return noise_key(stream_ + reductions_++, step_); }

 private:
  const std::uint64_t stream_;
  std::int64_t step_ = 0;
  std::uint64_t reductions_ = 0;
};

}  // namespace tessera
