#pragma once

#include <cstdint>
#include <vector>

namespace tessera {

/// Durations of one thing measured again and again, in nanoseconds, in the order in which they were taken.
struct Samples {
  std::vector<std::int64_t> ns;

  bool empty() const { return ns.empty(); }
  /// The smallest sample that at least the part `p` of all (0 < p <= 1) do not exceed, in seconds; 0 without samples.
  double quantile_s(double p) const;
  double median_s() const { return quantile_s(0.5); }
};

}  // namespace tessera
