#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "optim/rule_optimizer.h"

namespace tessera {

/// Makes updates by LAMB and LARS. The length of a step depends on the norms of each tensor, which no rank holds as a
/// whole. A step therefore has two passes, and ranks add up their parts of the norms between them. It works on the CPU.
/// Many threads may use it at once, on disjoint slices.
class LayerwiseOptimizer final : public Optimizer {
 public:
  /// `config.type`: lamb or lars.
  explicit LayerwiseOptimizer(const OptimizerConfig& config, const EmaConfig& ema = {},
                              InstructionSet set = best_instruction_set());

  /// lamb has exp_avg and exp_avg_sq; lars has momentum_buffer, where there is momentum. The average comes last, where
  /// weights are averaged.
  const std::vector<StateInfo>& states() const override { return elements_.states(); }

  /// Returns true for lamb: the update's norm is that of the directions that the first pass makes. For lars it is
  /// false, since the norm is that of the gradient.
  bool makes_directions() const { return makes_direction(elements_.rule()); }

  /// Makes the first pass. It calls `add(begin, weights, directions)` for the slice's elements in order: both are fp32
  /// [m] and belong to the elements from `begin` on. lamb updates the moments, and writes directions to `direction`
  /// [n], which may be the memory of the slice's gradient. lars changes nothing, and has no directions.
  template <class Add>
  void measure(const StepScalars& scalars, const OptimizerSlice& slice, std::span<float> direction,
               const Add& add) const {
    const StepArguments whole = arguments(scalars, slice);
    float weights[kPiece], directions[kPiece];
    for (std::size_t begin = 0, count = 0; begin < whole.numel; begin += count) {
      count = std::min<std::size_t>(kPiece - (slice.first_element + begin) % kPiece, whole.numel - begin);
      read(scalars, part_of(whole, begin, count), weights, directions);
      if (makes_directions()) std::copy_n(directions, count, direction.data() + begin);
      add(begin, std::span<const float>(weights, count),
          std::span<const float>(directions, makes_directions() ? count : std::size_t{0}));
    }
  }

  /// Returns the factor of a tensor's rate (trust_ratio.h).
  double trust_ratio(double weights_norm, double update_norm) const;

  /// Makes the second pass, over a run of one tensor. `scalars.lr` already has the tensor's ratio. lamb:
  /// `slice.gradient` has the directions; they are neither scaled nor clipped.
  void step(const StepScalars& scalars, const OptimizerSlice& slice) const override;
  /// Makes the second pass for the slice's elements [begin, begin + count), which belong to one tensor.
  void step(const StepScalars& scalars, const OptimizerSlice& slice, std::size_t begin, std::size_t count) const;
  /// Returns the optimizer of single elements, which has the states and the numbers of the formulas.
  const RuleOptimizer& elements() const { return elements_; }

  void average(const OptimizerSlice& slice) const override { elements_.average(slice); }
  void swap_average(const OptimizerSlice& slice) const override { elements_.swap_average(slice); }
  void set_numbers(const OptimizerConfig& config) override { elements_.set_numbers(config); }

 private:
  /// Number of elements in a piece; a piece stays in the first-level cache while several operations use it. The end of
  /// a piece is also the end of a block of the norms' trees.
  static constexpr std::size_t kPiece = 2048;

  StepArguments arguments(const StepScalars& scalars, const OptimizerSlice& slice) const;
  void read(const StepScalars& scalars, StepArguments piece, float* weights, float* directions) const;
  void update_by(StepRule rule, const RuleNumbers& numbers, const StepScalars& scalars, const StepArguments& a) const;

  RuleOptimizer elements_;
  const double trust_coefficient_;
  const StepLoops& loops_;
};

}  // namespace tessera
