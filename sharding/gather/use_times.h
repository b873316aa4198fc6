#pragma once

// See docs/glossary.md: unit.

#include <chrono>
#include <utility>
#include <vector>

namespace tessera {

/// Records when a program used its units, and when it reached the parts of a step. A StepProfile
/// (planner/measured/step_profile.h) is made from these times.
class UseTimes {
 public:
  using Clock = std::chrono::steady_clock;
  enum class Event { kUse, kBackward, kBackwardEnd, kStep, kStepEnd };
  struct Entry {
    Event event = Event::kUse;
    /// For kUse: the unit that an operator reads, or to which a gradient belongs. Repeated uses in a row are one entry.
    int unit = -1;
    Clock::time_point at;
  };

  /// It is called when a unit is used.
  void use(int unit) {
    if (!entries_.empty() && entries_.back().event == Event::kUse && entries_.back().unit == unit) return;
    entries_.push_back({Event::kUse, unit, Clock::now()});
  }
  /// It is called when the program reaches another part of the step.
  void mark(Event event) { entries_.push_back({event, -1, Clock::now()}); }
  /// Returns all entries since the last call.
  std::vector<Entry> take() { return std::exchange(entries_, {}); }

 private:
  std::vector<Entry> entries_;
};

}  // namespace tessera
