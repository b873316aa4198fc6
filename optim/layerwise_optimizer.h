#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include "optim/rule_optimizer.h"

namespace tessera {

/// Makes updates by LAMB and LARS, on the CPU. The size of an update depends on the norms of whole tensors, and a rank
/// may hold only parts of them. A step therefore has two passes, and between them ranks add up their parts of the
/// norms. Many threads may use it at once, on disjoint slices.
class LayerwiseOptimizer final : public Optimizer {
 public:
  /// `config.type`: lamb or lars.
  explicit LayerwiseOptimizer(const OptimizerConfig& config, const EmaConfig& ema = {},
                              InstructionSet set = best_instruction_set());

  /// Returns the states: exp_avg and exp_avg_sq for lamb; momentum_buffer for lars, if there is momentum. If weights
  /// are averaged, the average is the last state.
  const std::vector<StateInfo>& states() const override { return elements_.states(); }

  /// Returns true for lamb: the update's norm is the norm of the directions that the first pass computes. Returns false
  /// for lars: the update's norm is the norm of the gradient.
  bool makes_directions() const { return makes_direction(elements_.rule()); }

  /// Makes the first pass. It calls `add(begin, weights, directions)` for the slice's elements in order: `weights` and
  /// `directions` have one fp32 number for each element from `begin` on. lamb updates the moments, and writes
  /// directions to `direction` [n], which may be the memory of the slice's gradient. lars changes nothing, and has no
  /// directions.
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

  /// Makes the second pass, over a run of one tensor. `scalars.lr` is already multiplied by the tensor's trust ratio.
  /// If the rule is lamb, `slice.gradient` has the directions, which are neither scaled nor clipped.
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
  /// a piece is also the end of a block in the trees by which norms are added up (norm_tree.h).
  static constexpr std::size_t kPiece = 2048;

  StepArguments arguments(const StepScalars& scalars, const OptimizerSlice& slice) const;
  void read(const StepScalars& scalars, StepArguments piece, float* weights, float* directions) const;
  void update_by(StepRule rule, const RuleNumbers& numbers, const StepScalars& scalars, const StepArguments& a) const;

  RuleOptimizer elements_;
  const double trust_coefficient_;
  const StepLoops& loops_;
};

}  // namespace tessera
