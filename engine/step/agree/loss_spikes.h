#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tessera/strategy.h"

namespace tessera {

/// What loss spikes are told by, for a checkpoint.
struct SpikeHistory {
  std::vector<double> losses;        ///< the window's, oldest first
  std::int64_t spikes_in_a_row = 0;  ///< up to the latest step
};

/// Tells the steps whose loss is far above those before them (SpikeConfig).
///
/// The window holds the losses of the last `window` steps that were no spikes. A step is a spike if the window is full and its loss is
/// above `factor` times the window's median: of an even number of losses the mean of the two in the middle. After window / 2 spikes in
/// a row (at least one) the loss is taken to have changed for good, and the window begins anew with it. A loss that is no finite number
/// never gets into the window. All memory is allocated at once.
class LossSpikes {
 public:
  explicit LossSpikes(const SpikeConfig& config);

  enum class Verdict {
    kNone,
    kSpike,    ///< the step is to be skipped
    kChanged,  ///< it would be one, but so were those before it: the window has begun anew
  };
  /// Of the next step. REQUIRES: `loss` is not negative.
  Verdict add(double loss);
  /// That the latest loss was compared with; 0 while the window is not full.
  double median() const { return median_; }
  std::int64_t window() const { return static_cast<std::int64_t>(size_); }

  SpikeHistory history() const;
  /// Goes on from there, with as many of the losses as there is room for: the latest.
  void restore(const SpikeHistory& history);

 private:
  void push(double loss);
  double find_median();

  const double factor_;
  const std::size_t size_;
  const std::int64_t most_in_a_row_;
  std::vector<double> losses_;  ///< a ring
  std::vector<double> sorted_;  ///< in part, to find the median
  std::size_t count_ = 0;       ///< of the losses that are there
  std::size_t next_ = 0;        ///< place of the next one
  std::int64_t in_a_row_ = 0;
  double median_ = 0;
};

}  // namespace tessera
