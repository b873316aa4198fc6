#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace tessera {

/// The number of gradients of each age ("sync" asynchronous and hogwild), in 12 buckets. StepResult::staleness_mean
/// defines the age of a gradient. Engine::staleness and StepResult::ages are histograms of this type.
///
/// | bucket | 0 to 7     | 8       | 9        | 10       | 11          |
/// |--------|------------|---------|----------|----------|-------------|
/// | ages   | its number | 8 to 15 | 16 to 31 | 32 to 63 | 64 and more |
struct AgeHistogram {
  static constexpr std::size_t kBuckets = 12, kExact = 8;  ///< number of buckets; number of buckets of a single age

  std::array<std::int64_t, kBuckets> counts{};  ///< [bucket]: number of gradients

  /// Counts a gradient. An age below 0 counts as 0.
  void add(std::int64_t age) {
    std::size_t bucket = 0;
    while (bucket + 1 < kBuckets && age >= first_age(bucket + 1)) ++bucket;
    ++counts[bucket];
  }
  /// Adds the counts of another histogram.
  void add(const AgeHistogram& other) {
    for (std::size_t bucket = 0; bucket < kBuckets; ++bucket) counts[bucket] += other.counts[bucket];
  }
  /// Returns the number of gradients in all buckets.
  std::int64_t total() const {
    std::int64_t sum = 0;
    for (const std::int64_t count : counts) sum += count;
    return sum;
  }
  /// Returns the least age of a bucket.
  static constexpr std::int64_t first_age(std::size_t bucket) {
    return static_cast<std::int64_t>(bucket < kExact ? bucket : kExact << (bucket - kExact));
  }
  /// Returns the ages of a bucket as text, such as "3", "8-15" or "64+".
  static std::string name_of(std::size_t bucket) {
    if (bucket < kExact) return std::to_string(bucket);
    const std::string first = std::to_string(first_age(bucket));
    return bucket + 1 == kBuckets ? first + "+" : first + "-" + std::to_string(first_age(bucket + 1) - 1);
  }
};

}  // namespace tessera
