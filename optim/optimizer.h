#pragma once

// See docs/glossary.md: flat group.

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "runtime/base/state_dtype.h"
#include "tessera/dtype.h"
#include "tessera/strategy.h"

namespace tessera {

/// The numbers that one step needs in addition to the tensors. All parameters of a step share these numbers.
struct StepScalars {
  float gradient_scale = 1.0f;  ///< every gradient is multiplied by it: clip / (sum of weights * loss scale)
  float clip_value = 0.0f;      ///< limit to which each scaled gradient is clipped, on both sides; 0: none
  float lr = 0.0f;
  std::int64_t step = 1;         ///< number of this step among the applied ones, from 1, for bias correction
  bool is_first_of_run = false;  ///< whether no step was applied before, to any parameter (average_start)
};

/// A state that an optimizer keeps for each element.
struct StateInfo {
  std::string name;  ///< "exp_avg", "exp_avg_sq", "momentum_buffer": as PyTorch names it; "ema"
  StateDType dtype = StateDType::kF32;
};

/// Memory of one state for a run of parameters; state_bytes (runtime/base/state_dtype.h) gives its size.
struct StateSlice {
  std::span<std::byte> data = {};  ///< numbers in the optimizer's state dtype; empty where there is no such state
  std::span<float> scales = {};    ///< k8Bit: one scale for every 256 elements; else empty
};

/// A contiguous run of `n` parameters of one flat group, with all that the optimizer keeps for them.
struct OptimizerSlice {
  std::span<const float> gradient = {};  ///< [n] fp32: sums over ranks and microbatches, not yet scaled; only read

  MasterKind master_kind = MasterKind::kF32;
  std::span<float> master = {};  ///< kF32: [n] fp32, updated in place; else empty
  /// kSplitBF16: [n], the low half of the master, which the parameter lacks (rounding.h); else empty
  std::span<std::int16_t> low = {};
  /// kF32: [n] of parameter_dtype: gets the master's value, rounded to nearest even; null if the master *is* the
  /// parameter.
  /// kSplitBF16: [n] bf16, the master's high half, updated in place: the nearest bf16, ties away from zero.
  void* parameter = nullptr;
  DType parameter_dtype = DType::kF32;

  std::array<StateSlice, kMostStates> states = {};  ///< [n] each, ordered as Optimizer::states; the others are empty

  /// The position of the run: the index of its first element in the group, and the number of the group. Stochastic
  /// rounding may depend only on these and on the step. k8Bit: first_element is a multiple of 256, and no other run has
  /// elements in this run's last block, since the elements of a block share a scale.
  std::uint64_t first_element = 0;
  std::uint64_t stream = 0;
};

/// Updates a flat run of parameters, in one pass: scales the gradient, updates state and master, rounds into the
/// parameter's dtype. The result for an element depends on nothing but that element's values, its place in the group
/// (by stochastic rounding), and the scalars; with 8-bit states, on its block of 256 too. It does not depend on where a
/// run begins, on the instruction set, or on threads. So shards may be cut anywhere; with 8-bit states, at the bounds
/// of blocks.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Returns the states that are kept in addition to the master, at most kMostStates. All begin with zeros. The average
  /// of the weights comes last, if there is one.
  virtual const std::vector<StateInfo>& states() const = 0;
  /// Returns the dtypes of `states`.
  StateFormats state_formats() const;
  /// Throws `std::invalid_argument` if the slice's parts do not fit each other or this optimizer.
  virtual void step(const StepScalars& scalars, const OptimizerSlice& slice) const = 0;
  /// Makes a step for parameters that this step does not change, but an earlier step did: it updates only the average
  /// of the masters. Gradients are not read. Throws as `step` does.
  virtual void average(const OptimizerSlice& slice) const = 0;
  /// Exchanges the masters and their averages; parameters are then rounded from the new masters. Two exchanges change
  /// no bit, except that all NaNs of split masters become the same NaN. REQUIRES: there are averages. Throws as `step`
  /// does.
  virtual void swap_average(const OptimizerSlice& slice) const = 0;
  /// Uses the numbers of `config` from the next step on: another decay, other betas. The optimizer keeps its states,
  /// even one that `config` does not use, such as the momentum buffer when momentum is 0. REQUIRES: no call is under
  /// way; `config` needs no further state.
  virtual void set_numbers(const OptimizerConfig& config) = 0;
};

/// Makes the optimizer that updates elements one by one; under muon and own_matrix, elements of parameters that are no
/// matrices. It only describes the states under lamb and lars; LayerwiseOptimizer makes those updates. Throws
/// `std::invalid_argument` for kOwn and kAdafactor, which update no elements by themselves.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config, const EmaConfig& ema = {});

/// Returns `optimizer` with a group's own numbers, but not its rate.
OptimizerConfig config_of(const OptimizerConfig& optimizer, const ParameterGroup& group);

}  // namespace tessera
