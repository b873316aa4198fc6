#pragma once

#include <cstdint>
#include <utility>

namespace tessera {

/// Tells the first reduction of a step from later ones, for work that a method does once a step.
class FirstOfStep {
 public:
  /// Call it where GradientMethod::begin_step is called.
  void begin_step(std::int64_t step) {
    if (step != step_) is_next_ = true;
    step_ = step;
  }
  /// Returns whether the reduction that begins now is the first of its step; the one after it is not.
  bool take() { return std::exchange(is_next_, false); }

 private:
  std::int64_t step_ = 0;
  bool is_next_ = true;
};

}  // namespace tessera
