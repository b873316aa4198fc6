#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tessera {

/// Durations of one operation that was measured repeatedly, in nanoseconds, in the order in which they were taken.
struct Samples {
  std::vector<std::int64_t> ns;

  bool empty() const { return ns.empty(); }
  /// Returns the smallest sample that at least the share `p` (0 < p <= 1) of all samples do not exceed, in seconds; 0
  /// without samples.
  double quantile_s(double p) const;
  double median_s() const { return quantile_s(0.5); }
};

/// Returns how many times as long `longer` takes. Both were measured by turns, `a_turn` samples each time; the result
/// is the median over turns of the ratio of their medians. So other load that lasts longer than a turn slows down both.
/// It is 0 without a whole turn of both. REQUIRES: a_turn > 0.
double ratio_by_turns(const Samples& longer, const Samples& shorter, std::size_t a_turn);

}  // namespace tessera
