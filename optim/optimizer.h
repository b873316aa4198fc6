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

/// The numbers that a step needs in addition to the tensors. All parameters of one slice share these numbers.
struct StepScalars {
  float gradient_scale = 1.0f;  ///< factor for every gradient: clip / (sum of weights * loss scale)
  float clip_value = 0.0f;      ///< largest magnitude to which each scaled gradient is clipped; 0: no limit
  float lr = 0.0f;
  std::int64_t step = 1;         ///< number of updates of these parameters, this one included; for bias correction
  bool is_first_of_run = false;  ///< whether no step was applied before, to any parameter (average_start)
};

/// A state that an optimizer keeps for each element.
struct StateInfo {
  std::string name;  ///< the name that PyTorch uses, such as "exp_avg" or "momentum_buffer"; or "ema"
  StateDType dtype = StateDType::kF32;
};

/// Memory of one state for a run of parameters; state_bytes (runtime/base/state_dtype.h) gives its size.
struct StateSlice {
  std::span<std::byte> data = {};  ///< numbers in the optimizer's state dtype; empty if there is no such state
  std::span<float> scales = {};    ///< k8Bit: one scale for every 256 elements; else empty
};

/// A contiguous run of `n` elements of one flat group, with all the state that the optimizer keeps for them.
struct OptimizerSlice {
  std::span<const float> gradient = {};  ///< [n] fp32: sums over ranks and microbatches, not yet scaled; only read

  MasterKind master_kind = MasterKind::kF32;
  std::span<float> master = {};  ///< kF32: [n] fp32, updated in place; else empty
  /// kSplitBF16: [n], the low halves of the masters; the parameters are the high halves (rounding.h); else empty
  std::span<std::int16_t> low = {};
  /// kF32: [n] of parameter_dtype, to which the master is written, rounded to nearest even; null if the master *is* the
  /// parameter. kSplitBF16: [n] bf16, the master's high half, updated in place: the nearest bf16, ties away from zero.
  void* parameter = nullptr;
  DType parameter_dtype = DType::kF32;

  std::array<StateSlice, kMostStates> states = {};  ///< [n] each, in the order of Optimizer::states; further entries
                                                    ///< are empty

  /// The position of the run: the index of its first element in the group, and the number of the group. Stochastic
  /// rounding may depend only on these numbers and on the step. If states are k8Bit, first_element is a multiple of
  /// 256, and no other run has elements in this run's last block, since the elements of a block share a scale.
  std::uint64_t first_element = 0;
  std::uint64_t stream = 0;
};

/// Updates a flat run of parameters in one pass. It scales the gradient, updates state and master, and rounds to the
/// parameter's dtype. The result for an element depends only on that element's values, on its index in the group
/// (because of stochastic rounding), and on the scalars. If states have 8 bits, it also depends on the element's block
/// of 256. It does not depend on the beginning of the run, on the instruction set, or on threads. So shards may be cut
/// anywhere, or at block boundaries if states have 8 bits.
class Optimizer {
 public:
  virtual ~Optimizer() = default;
  /// Returns the states that are kept in addition to the master, at most kMostStates. All states begin with zeros. If
  /// there is an average of the weights, it is the last state.
  virtual const std::vector<StateInfo>& states() const = 0;
  /// Returns the dtypes of `states`.
  StateFormats state_formats() const;
  /// Throws `std::invalid_argument` if the slice's parts do not fit each other or this optimizer.
  virtual void step(const StepScalars& scalars, const OptimizerSlice& slice) const = 0;
  /// Makes a step for parameters that an earlier step has changed and this step does not change: it updates only the
  /// average of the masters. Gradients are not read. Throws as `step` does.
  virtual void average(const OptimizerSlice& slice) const = 0;
  /// Exchanges the masters and their averages; parameters are then rounded from the new masters. Two exchanges change
  /// no bit, except that all NaNs of split masters become the same NaN. REQUIRES: there are averages. Throws as `step`
  /// does.
  virtual void swap_average(const OptimizerSlice& slice) const = 0;
  /// Uses the numbers of `config`, such as another decay or other betas, from the next step on. The optimizer keeps all
  /// its states, even a state that `config` does not use, such as the momentum buffer when momentum is 0. REQUIRES: no
  /// call is under way; `config` needs no further state.
  virtual void set_numbers(const OptimizerConfig& config) = 0;
};

/// Makes the optimizer that updates elements one by one. If the type is muon or own_matrix, it is for the parameters
/// that are not updated as matrices. If the type is lamb or lars, it only describes the states, since
/// LayerwiseOptimizer makes the updates. Throws `std::invalid_argument` for kOwn and kAdafactor, which do not update
/// elements one by one.
std::unique_ptr<Optimizer> make_optimizer(const OptimizerConfig& config, const EmaConfig& ema = {});

/// Returns `optimizer` with the numbers of a group, except the group's rate.
OptimizerConfig config_of(const OptimizerConfig& optimizer, const ParameterGroup& group);

}  // namespace tessera
