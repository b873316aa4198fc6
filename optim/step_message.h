#pragma once

// See docs/glossary.md: flat group, unit.

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/norm_tree.h"
#include "optim/arithmetic/step_arguments.h"
#include "optim/arithmetic/step_decision.h"
#include "optim/arithmetic/step_messages.h"
#include "optim/rules/rules.h"

namespace tessera {

// This file defines the data of a step on a GPU. The host does not wait for the device's decision. At the end of
// backward each rank writes a message (StepMessages) in device memory. The ranks gather all messages. The device makes
// the decision from them, and makes the update. All types in this file are plain data that the host and the kernels
// (optim/cuda) share.

/// The largest number of steps whose outcome the host has not received yet.
constexpr int kMostStepsInFlight = 4;

/// Returns whether the step that is being applied is the run's first (average_start).
TESSERA_ALWAYS_INLINE bool is_first_of_run(const StepDecision& decision, bool updates_in_backward) {
  // A step with updates in backward is not counted yet.
  return decision.so_far.applied == (updates_in_backward ? 0 : 1);
}

/// The part of a step's data that the host supplies. Kernels get it by value.
struct StepRequest : DecisionRule {
  StepRule rule = StepRule::kAdam;
  RuleNumbers numbers;             ///< numbers for parameters in no group
  RuleNumbers of_matrices;         ///< muon only: numbers of SGD, for parameters that are matrices
  double trust_coefficient = 0.0;  ///< only lars reads it (trust_ratio.h)
  /// The schedule's ratios: first the ratio if `known_skipped` steps were skipped so far, then the ratio if one more
  /// step was skipped, and so on.
  double lr_ratios[kMostStepsInFlight + 1] = {};
  std::int64_t known_skipped = 0;
};

/// A unit that is updated while backward runs. Kernels get it by value.
struct UnitRequest {
  std::int32_t unit = 0;
  std::uint32_t first_group = 0, groups = 0;          ///< the unit's groups in StepTables
  std::uint32_t first_parameter = 0, parameters = 0;  ///< the unit's parameters in StepTables
  std::uint32_t sum_count = 0, digest_bits = 0;
  /// [sum_count]: the norm's sums over this rank's part of the unit's gradients; all pointers here point to device
  /// memory
  const double* sums = nullptr;
  const float* weight = nullptr;  ///< [1]: sum of the weights over all ranks
  /// [1]: number of samples of all ranks; null if the rate does not depend on samples
  const float* samples = nullptr;
  const float* used = nullptr;    ///< [parameters]: above 0 if some rank used the parameter
  const float* differ = nullptr;  ///< [digest_bits]: 0 unless ranks gathered units in different orders
};

/// The range of one group's parameters among the parameters of all groups.
struct StepGroup {
  std::uint32_t first_parameter = 0, parameters = 0;
};

/// Numbers of a parameter group (OptimizerConfig::groups).
struct GroupNumbers {
  RuleNumbers numbers;
  double lr_ratio = 1.0;         ///< factor that is applied to the rate of parameters without a group
  double lr = 0.0;               ///< the group's own rate, which was set by hand; NaN if there is none
  RuleNumbers of_matrices = {};  ///< StepRequest::of_matrices
  bool adapts_layers = true;     ///< lamb and lars only: whether rates are multiplied by trust ratios
};

/// The squared norms of gradients, and the data with which they are added up from messages (NormTotals). All pointers
/// are to device memory; [n] is a length. Ranks and links are written once.
struct StepNorms {
  int tensors = 0;                           ///< number of tensors: all parameters, in order of registration
  const std::int32_t* part_ranks = nullptr;  ///< the ranks whose parts make up the whole gradient, in the parts' order
  const NormLink* links = nullptr;
  const std::uint32_t* first_link = nullptr;  ///< [tensors + 1]
  double* link_scratch = nullptr;             ///< scratch: one number for each link
  double* squares = nullptr;                  ///< [tensors]: squared norm of the summed, unscaled gradient
  double* sum_of_squares = nullptr;           ///< [1]
};

/// The addresses of a step's data. All pointers point to device memory; [n] is a length.
struct StepTables {
  int ranks = 1, shard_size = 1, parameters = 0, groups = 0;
  /// Whether units are updated in backward. If so, the steps of a parameter are counted when its unit is updated
  /// (UnitRequest), and not at the step's end. The run then ends with its first skipped step.
  bool updates_in_backward = false;
  /// Number of a rank's microbatches in a step, under "reproducible"; 0 otherwise. A rank's microbatches are neighbours
  /// in the tree of sums. Loss and weight are then sums in that tree.
  int rounds = 0;
  StepMessages messages;
  StepNorms norm;
  // These tables are written once.
  const StepGroup* group = nullptr;  ///< one for each group
  /// [parameters]: number of the parameter's group, from 1; 0: no group. It is null if no parameter has a group
  const std::uint32_t* group_number = nullptr;
  /// [parameters]: whether the parameter is updated with a matrix that muon made orthogonal. It is null if no parameter
  /// is a matrix
  const std::uint8_t* is_matrix = nullptr;
  // These tables are written for each step.
  const GroupNumbers* group_numbers = nullptr;  ///< one entry for each parameter group
  std::uint8_t* used = nullptr;                 ///< [parameters]: whether any rank used the parameter
  /// [groups]: whether all parameters are used and have the same number of steps and the same options
  std::uint8_t* is_uniform = nullptr;
  RuleConstants* constants = nullptr;  ///< one entry for each parameter
  // These tables keep their values from step to step.
  std::int64_t* steps = nullptr;     ///< [parameters]: number of applied steps
  StepDecision* decision = nullptr;  ///< [1]
  double* losses = nullptr;          ///< [SpikeRule::window]: the losses of the window, as a ring
};

/// The norms that are exchanged together during a step of lamb or lars. They belong to all parameters, or in backward
/// to the parameters of one unit. The fields are like those of StepNorms, but are about optimizer parts (the elements
/// that each rank updates).
struct LayerTables {
  /// Number of kinds of norms: those of weights, and those of updates if the rule computes directions. lars has a
  /// second kind only in backward: the norms of gradients, since the step's norms are not computed yet.
  int kinds = 1;
  std::size_t most_sums = 0;                          ///< largest number of sums of one kind that a rank sends
  std::uint32_t first_parameter = 0, parameters = 0;  ///< the parameters in StepTables to which these norms belong
  std::uint32_t first_group = 0, groups = 0;          ///< the groups of these parameters
  const std::int32_t* part_ranks = nullptr;
  const NormLink* links = nullptr;
  const std::uint32_t* first_link = nullptr;  ///< [parameters + 1]
  const std::uint32_t* tensor = nullptr;      ///< [parameters]: the parameter's index in StepNorms::squares
  const double* messages = nullptr;           ///< [StepTables::ranks][kinds][most_sums]
  double* link_scratch = nullptr;
  double* squares = nullptr;  ///< [kinds][parameters]
};

/// The beginning of a parameter in its group, counted in blocks of 32 elements. The parameter ends where the next
/// parameter begins.
struct ParameterBegin {
  std::uint32_t begin = 0;
  std::uint32_t parameter = 0;  ///< number among the parameters of all groups
};
constexpr std::uint64_t kParameterAlign = 32;

/// A run of elements of a flat group; see OptimizerSlice.
struct DeviceRun {
  StepRule rule = StepRule::kAdam;
  /// The arguments, without the fields that only the device has: gradient_scale, noise, first_element, average.start.
  StepArguments arguments;
  std::uint64_t stream = 0;  ///< number of the group, for stochastic rounding
  /// Index of the run's first element in the group; a multiple of 32, and with 8-bit states a multiple of 256.
  std::uint64_t first_element = 0;
  std::uint32_t group = 0;       ///< index in StepTables
  bool takes_direction = false;  ///< whether the gradient's memory holds a direction, which is neither scaled nor
                                 ///< clipped
  float* direction = nullptr;    ///< kLamb only: memory for directions, which may be that of the gradient
  std::uint32_t parameters = 0;  ///< number of the group's parameters
  const ParameterBegin* begins = nullptr;  ///< [parameters], ascending; in device memory
};

}  // namespace tessera
