#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace tessera {

/// Counts how long calls took, from a nanosecond to nearly five hours. The times in one bucket differ by at most 1/16.
/// Still longer calls are in the last bucket. The histogram has a fixed size and allocates nothing. It is not
/// thread-safe.
class LatencyHistogram {
 public:
  /// Counts one call. A negative time counts as 0.
  void add(std::chrono::nanoseconds time);

  std::int64_t count() const { return count_; }
  /// Returns a time in seconds that at least `percent` % of the calls did not exceed (nearest rank); NaN if nothing was
  /// added. The result is at most 1/16 above a time that was measured, and never above `max`.
  /// REQUIRES: 0 < percent <= 100.
  double percentile(double percent) const;
  /// Returns the longest time in seconds, exactly; 0 if nothing was added.
  double max() const { return std::chrono::duration<double>(max_).count(); }

 private:
  static constexpr int kSubBits = 4;    ///< a power of two has 2^4 buckets
  static constexpr int kMostBits = 44;  ///< times from 2^44 ns on are in the last bucket
  static constexpr std::size_t kBuckets = static_cast<std::size_t>(kMostBits - kSubBits + 1) << kSubBits;

  std::array<std::uint32_t, kBuckets> counts_{};
  std::int64_t count_ = 0;
  std::chrono::nanoseconds max_{0};
};

}  // namespace tessera
