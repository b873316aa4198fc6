#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "optim/arithmetic/spike_rule.h"
#include "tessera/strategy.h"

namespace tessera {

/// The part of LossSpikes that a checkpoint keeps.
struct SpikeHistory {
  std::vector<double> losses;        ///< losses of the window, oldest first
  std::int64_t spikes_in_a_row = 0;  ///< number of spikes in a row up to the latest step
};

/// The losses with which a step's loss is compared, to find one that is far above them (SpikeConfig). SpikeRule
/// (optim/arithmetic/spike_rule.h) decides about a step. CpuStep keeps the window here. A GPU keeps its own, and the
/// host makes a LossSpikes only to read and write the SpikeHistory of a checkpoint.
///
/// The window holds the losses of the last `window` steps that were no spikes. A step is a spike if the window is full
/// and its loss is above `factor` times the window's median. The median of an even number of losses is the mean of the
/// two in the middle. The change counts as lasting if window / 2 spikes (at least one) came in a row and the next loss
/// is high too. The step of that loss is then not skipped, and the window begins anew with that loss. A loss that is
/// not finite never gets into the window. All memory is allocated when the object is made.
class LossSpikes {
 public:
  explicit LossSpikes(const SpikeConfig& config);

  /// Returns the median of the losses; 0 while the window is not full.
  double median();

  SpikeHistory history() const;
  /// Continues from `history`. If it has more losses than the window, the latest ones are used.
  void restore(const SpikeHistory& history);

  const SpikeRule& rule() const { return rule_; }
  /// Returns the state and the ring, which the caller may read and write.
  SpikeState& state() { return state_; }
  std::span<double> losses() { return losses_; }

 private:
  const SpikeRule rule_;
  SpikeState state_;
  std::vector<double> losses_;  ///< losses of the window, as a ring
  std::vector<double> sorted_;  ///< scratch: sorted in part to find the median
};

/// Warns about step `step` if its verdict calls for a warning. `median`: the median with which the loss was compared.
/// Throws tessera::Error (78) if the loss was negative.
void report_spike(const SpikeConfig& config, SpikeVerdict verdict, std::int64_t step, double loss, double median);

}  // namespace tessera
