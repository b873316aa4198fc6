#pragma once

// See docs/glossary.md: unit.

#include <vector>

#include "planner/measured/step_profile.h"
#include "sharding/gather/use_times.h"
#include "tessera/engine.h"

namespace tessera {

/// Measures how long a single rank computes with each unit. Steps of many ranks are predicted from these times. The
/// profiler watches operators, which costs some microseconds for each operator.
class StepProfiler {
 public:
  /// Throws tessera::Error (64) if there are several ranks, if a GPU trains, or if parameters lie on disk. In these
  /// cases a unit's measured time would include waits and other work.
  explicit StepProfiler(Engine& engine);
  ~StepProfiler();
  StepProfiler(const StepProfiler&) = delete;
  StepProfiler& operator=(const StepProfiler&) = delete;

  /// Call it after each step. The first step of a run should not count (`counts` false).
  void end_step(bool counts = true);
  /// Returns medians over the steps that counted. A microbatch counts if it used its units in the same order as the
  /// last microbatch of all these steps. Throws tessera::Error (64) if no step counted.
  StepProfile profile() const;

 private:
  using Round = std::vector<ProfileEntry>;
  using Entries = std::vector<UseTimes::Entry>;

  Round round_of(const Entries& entries, std::size_t begin, std::size_t end) const;

  Engine& engine_;
  UseTimes times_;
  const bool had_watch_;
  std::vector<Round> rounds_;
  std::vector<double> updates_, rests_;  ///< seconds of updates and of the rest, for each step
};

}  // namespace tessera
