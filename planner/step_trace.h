#pragma once

// See docs/glossary.md: agreement, unit.

#include <set>
#include <string>
#include <vector>

#include "planner/step_clock.h"

namespace tessera {

/// A recorder that shows the steps of some ranks as a trace: elements of "traceEvents" in Chrome's trace format, as
/// Trace::events_as_json (include/tessera/span.h) returns them for a real run. Each rank is a process. Its thread 0 is
/// the rank's program, 1 the gathers of its group, 2 the reductions, 3 the replicate axis, 4 and 5 the barriers of the
/// two axes, and 6 the agreement. The name of a span contains the action and the unit: "forward blocks.3".
class StepTrace final : public PlayRecorder {
 public:
  /// `units`: names of the units.
  StepTrace(const std::vector<int>& ranks, std::vector<std::string> units)
      : ranks_(ranks.begin(), ranks.end()), units_(std::move(units)) {}

  /// Sets the time in the trace, in seconds, at which the next recorded step begins.
  void begin_step(double offset_s) { offset_s_ = offset_s; }
  void span(int rank, std::size_t lane, const char* what, int unit, double begin_s, double end_s) override;

  const std::string& events_as_json() const { return events_; }

 private:
  const std::set<int> ranks_;
  const std::vector<std::string> units_;
  double offset_s_ = 0;
  std::string events_;
};

}  // namespace tessera
