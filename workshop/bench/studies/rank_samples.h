#pragma once

#include <chrono>
#include <cstdint>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/comm/collectives.h"
#include "workshop/bench/samples.h"

namespace tessera::app {

/// The clock of all samples.
using SampleClock = std::chrono::steady_clock;

inline std::int64_t nanoseconds_between(SampleClock::time_point begin, SampleClock::time_point end) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count();
}
/// Returns the nanoseconds from `begin` until now.
inline std::int64_t nanoseconds_since(SampleClock::time_point begin) {
  return nanoseconds_between(begin, SampleClock::now());
}

/// Replaces every sample by the sample that `choose` takes among all ranks' samples with the same number. The call is
/// collective; all ranks have equally many samples.
template <class Choose>
void agree_on_samples(Collectives& group, Samples& samples, Choose choose) {
  const std::size_t count = samples.ns.size();
  std::vector<std::int64_t> all(count * static_cast<std::size_t>(group.size()));
  throw_if_error(group.all_gather("samples", samples.ns.data(), all.data(), count * sizeof(std::int64_t)).wait());
  for (std::size_t i = 0; i < all.size(); ++i) samples.ns[i % count] = choose(samples.ns[i % count], all[i]);
}
/// Chooses the slowest rank's sample.
inline const std::int64_t& larger(const std::int64_t& a, const std::int64_t& b) { return a < b ? b : a; }
/// Chooses the sample of the rank that waited least for other ranks.
inline const std::int64_t& smaller(const std::int64_t& a, const std::int64_t& b) { return b < a ? b : a; }

}  // namespace tessera::app
