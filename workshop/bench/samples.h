#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

/// Durations of one operation that was measured repeatedly, in nanoseconds, in the order of the measurements.
struct Samples {
  std::vector<std::int64_t> ns;

  bool empty() const { return ns.empty(); }
  /// Returns the smallest sample that at least the share `p` (0 < p <= 1) of all samples do not exceed, in seconds. It
  /// is 0 without samples.
  double quantile_s(double p) const;
  double median_s() const { return quantile_s(0.5); }
};

/// Returns the time of `longer` divided by that of `shorter`. Both were measured in turn, `a_turn` samples each time.
/// The result is the median over turns of the ratio of their medians. A load on the machine that lasts longer than a
/// turn therefore slows down both. It is 0 without a whole turn of both. REQUIRES: a_turn > 0.
double ratio_by_turns(const Samples& longer, const Samples& shorter, std::size_t a_turn);

}  // namespace tessera
