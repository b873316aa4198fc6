#pragma once

#include <cstdint>
#include <utility>

namespace tessera {

/// Distinguishes the first reduction of a step from later reductions, for work that a method does once in each step.
class FirstOfStep {
 public:
  /// Call it in GradientMethod::begin_step.
  void begin_step(std::int64_t step) {
    if (step != step_) is_next_ = true;
    step_ = step;
  }
  /// Returns whether the reduction that begins now is the first of its step. Call it once for each reduction.
  bool take() { return std::exchange(is_next_, false); }

 private:
  std::int64_t step_ = 0;
  bool is_next_ = true;
};

}  // namespace tessera
