#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

/// Durations of one operation that was measured repeatedly, in nanoseconds, in the order of the measurements.
struct Samples {
  std::vector<std::int64_t> ns;

  bool empty() const { return ns.empty(); }
  /// Returns the `p`-quantile (0 < p <= 1) in seconds: the smallest sample for which at least the share `p` of all
  /// samples are no larger. It is 0 if there are no samples.
  double quantile_s(double p) const;
  double median_s() const { return quantile_s(0.5); }
};

/// Returns the time of `longer` divided by that of `shorter`. The two operations were measured alternately, `a_turn`
/// samples of each in a turn. The result is the median, over the turns, of the ratio of the two medians in a turn. A
/// load on the machine that lasts longer than a turn therefore slows down both. The result is 0 if there is no whole
/// turn of both. REQUIRES: a_turn > 0.
double ratio_by_turns(const Samples& longer, const Samples& shorter, std::size_t a_turn);

}  // namespace tessera
