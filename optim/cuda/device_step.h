#pragma once

// See docs/glossary.md: unit.

#include <cuda_runtime_api.h>

#include "optim/rules/muon.h"
#include "optim/step_message.h"

namespace tessera::cuda {

/// Reads the messages of all ranks, as StepAgreement does on the CPU. It adds up losses, tokens and samples in rank
/// order, and writes them to the decision. If StepTables::rounds is not 0, it adds up losses in the tree over
/// microbatches instead. It compares the digests of gathers inside shard groups, and those of rates and options with
/// rank 0's. It ORs flags into `used`. The function norm_totals adds up the norm's sums.
cudaError_t read_messages(const StepTables& tables, cudaStream_t stream);

/// Decides the step from the sum of squares of all gradients (summed over ranks, unscaled), as Engine::step does on the
/// CPU. It computes the constants of each parameter:
///   norm = sqrt(sum_of_squares) * mean;  clip = max_norm > 0 ? min(1, max_norm / (norm + 1e-6)) : 1
///   steps[p] += used[p], constants[p] = rule_constants(rule, numbers, steps[p], lr), unless skipped
/// with mean = 1 / (sum of weights * loss scale) and the lr after the steps applied so far. A parameter in a group gets
/// the group's own numbers. Its lr is the group's own lr, or else the common lr times the group's factor. Then
/// decide_step updates the loss scale. If units were updated in backward, their parameters are not changed.
cudaError_t decide_step(const StepRequest& request, const StepTables& tables, cudaStream_t stream);

/// Begins the update of a unit whose gradients are summed, while backward runs:
///   steps[p] += used[p], constants[p] = rule_constants(rule, numbers, steps[p], lr) of its parameters
/// and puts the gradients' scale, 1 / the sum of weights, and lr into the decision. If a gradient of the unit is not
/// finite, or if ranks gathered units in different orders, this unit and all later units of the step are skipped
/// instead.
cudaError_t begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables,
                       cudaStream_t stream);

/// The value for no limit: a launch then has as many thread blocks as are useful.
inline constexpr unsigned kAnyBlocks = ~0u;

/// Makes the optimizer's pass over one run, in one launch of at most `most_blocks` thread blocks: it reads gradient,
/// weights and states once, and writes weights and states once. It gives the same bits as RuleOptimizer::step on the
/// CPU. If the rule is kLamb, it writes directions instead of weights (DeviceRun::direction). A parameter that is not
/// used does not change, except for its average. Nothing happens if the decision is to skip. REQUIRES: the requirements
/// of DeviceRun, and buffers of the group that are aligned to 128 bytes. The function returns
/// cudaErrorMisalignedAddress if an address in `run` is not a multiple of 16 bytes, or first_element not a multiple of
/// 32.
cudaError_t update_step(const DeviceRun& run, const StepTables& tables, cudaStream_t stream,
                        unsigned most_blocks = kAnyBlocks);

/// Does the part of Muon before matrices are made orthogonal (MuonMomentumRule). It updates the run's momenta, and
/// writes directions to the run's `arguments.master`, which may be the memory of the gradient. It gives the same bits
/// as MuonOptimizer::direction. Parameters that are not used do not change. REQUIRES: the requirements of update_step.
cudaError_t muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants, const StepTables& tables,
                            cudaStream_t stream);

/// Writes the run's masters to `masters` [numel], fp32, aligned to 16 bytes. REQUIRES: the requirements of update_step.
cudaError_t read_weights(const DeviceRun& run, float* masters, cudaStream_t stream);

/// Takes the values in the run's gradient as the new masters of the used parameters, and updates averages. It gives the
/// same bits as MasterAssigner::step. Nothing happens if the decision is to skip. REQUIRES: the requirements of
/// update_step.
cudaError_t assign_weights(const DeviceRun& run, const StepTables& tables, cudaStream_t stream);

/// Exchanges masters and averages of the parameters that some step has updated, as RuleOptimizer::swap_average does.
/// REQUIRES: the requirements of update_step.
cudaError_t swap_averages(const DeviceRun& run, const StepTables& tables, cudaStream_t stream);

}  // namespace tessera::cuda
