#pragma once

#include <chrono>
#include <utility>
#include <vector>

namespace tessera {

/// When a program used its units, and when it was where in a step: what a StepProfile (planner/measured/step_profile.h) is made of.
class UseTimes {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Event { kUse, kBackward, kBackwardEnd, kStep, kStepEnd };
  struct Entry {
    Event event = Event::kUse;
    int unit = -1;  ///< kUse: that an operator reads, or a gradient is of, and not just before
    Clock::time_point at;
  };

  void use(int unit) {
    if (!entries_.empty() && entries_.back().event == Event::kUse && entries_.back().unit == unit) return;
    entries_.push_back({Event::kUse, unit, Clock::now()});
  }
  void mark(Event event) { entries_.push_back({event, -1, Clock::now()}); }
  /// All since the last call.
  std::vector<Entry> take() { return std::exchange(entries_, {}); }

 private:
  std::vector<Entry> entries_;
};

}  // namespace tessera
