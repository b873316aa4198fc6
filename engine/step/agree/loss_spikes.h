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

/// Finds the steps whose loss is far above earlier losses (SpikeConfig). CpuStep asks it in each step. A GPU decides by
/// itself, with the same rule (optim/arithmetic/spike_rule.h). The host then makes a LossSpikes only to read and write
/// the SpikeHistory of a checkpoint.
///
/// The window holds the losses of the last `window` steps that were no spikes. A step is a spike if the window is full
/// and its loss is above `factor` times the window's median. The median of an even number of losses is the mean of the
/// two in the middle. If window / 2 spikes (at least one) came in a row and the next loss is high too, the change is
/// taken as lasting: that step is not skipped, and the window begins anew with its loss. A loss that is not finite
/// never gets into the window. All memory is allocated when the object is made.
class LossSpikes {
 public:
  using Verdict = SpikeVerdict;

  explicit LossSpikes(const SpikeConfig& config);

  /// Adds the loss of the next step and returns the verdict on it.
  Verdict add(double loss);
  /// Returns the median with which the latest loss was compared; 0 while the window is not full.
  double median() const { return state_.median; }

  SpikeHistory history() const;
  /// Goes on from `history`. If it has more losses than the window, the latest ones are used.
  void restore(const SpikeHistory& history);

  const SpikeRule& rule() const { return rule_; }
  /// Returns the state that a device keeps. The caller may read and write it.
  SpikeState& state() { return state_; }
  std::span<double> losses() { return losses_; }

 private:
  double find_median();

  const SpikeRule rule_;
  SpikeState state_;
  std::vector<double> losses_;  ///< losses of the window, as a ring
  std::vector<double> sorted_;  ///< scratch: sorted in part to find the median
};

/// Warns about step `step` if its verdict calls for a warning. `median`: the median with which the loss was compared.
/// Throws tessera::Error (78) if the loss was negative.
void report_spike(const SpikeConfig& config, SpikeVerdict verdict, std::int64_t step, double loss, double median);

}  // namespace tessera
