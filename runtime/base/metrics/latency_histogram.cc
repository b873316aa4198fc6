#include "runtime/base/metrics/latency_histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace tessera {

/// Times below 2^4 ns have a bucket each. Longer times have 16 buckets for each power of two. The four bits after the
/// leading bit choose one of them.
void LatencyHistogram::add(std::chrono::nanoseconds time) {
  const std::chrono::nanoseconds counted = std::max(time, std::chrono::nanoseconds(0));
  const auto value = std::min(static_cast<std::uint64_t>(counted.count()), (std::uint64_t{1} << kMostBits) - 1);
  const int shift = std::max(0, static_cast<int>(std::bit_width(value)) - (kSubBits + 1));
  ++counts_[(static_cast<std::size_t>(shift) << kSubBits) + static_cast<std::size_t>(value >> shift)];
  ++count_;
  max_ = std::max(max_, counted);
}

double LatencyHistogram::percentile(double percent) const {
  if (count_ == 0) return std::numeric_limits<double>::quiet_NaN();
  const auto rank = std::max<std::int64_t>(1, std::llround(std::ceil(percent / 100 * static_cast<double>(count_))));
  std::int64_t below = 0;
  std::size_t bucket = 0;
  while (bucket + 1 < kBuckets && (below += counts_[bucket]) < rank) ++bucket;
  constexpr std::size_t kSub = std::size_t{1} << kSubBits;
  const std::size_t shift = bucket < 2 * kSub ? 0 : bucket / kSub - 1;
  const std::uint64_t last = ((static_cast<std::uint64_t>(bucket - (shift << kSubBits)) + 1) << shift) - 1;
  return std::min(static_cast<double>(last) * 1e-9, max());
}

}  // namespace tessera
