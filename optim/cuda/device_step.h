#pragma once

#include <cuda_runtime_api.h>

#include "optim/rules/muon.h"
#include "optim/step_message.h"

namespace tessera::cuda {

/// Reads the messages of all ranks, as StepAgreement does on the CPU: adds up losses, tokens and samples in rank order into
/// the decision, compares digests inside shard groups, and ORs flags into `used`. The norm's sums are norm_totals's.
cudaError_t read_messages(const StepTables& tables, cudaStream_t stream);

/// Decides the step from the sum of squares of all (summed, unscaled) gradients, as Engine::step does on the CPU, and
/// folds the constants of each parameter:
///   norm = sqrt(sum_of_squares) * mean;  clip = max_norm > 0 ? min(1, max_norm / (norm + 1e-6)) : 1
///   steps[p] += used[p], constants[p] = rule_constants(rule, numbers, steps[p], lr), unless skipped
/// with mean = 1 / (sum of weights * loss scale) and the lr that belongs to the steps applied so far; of a parameter group its own numbers and
/// its share of that lr, or its own. Then moves the scale. Where units were updated in backward, their parameters are left as they are.
cudaError_t decide_step(const StepRequest& request, const StepTables& tables, cudaStream_t stream);

/// Begins the update of a unit whose gradients are summed, while backward goes on:
///   steps[p] += used[p], constants[p] = rule_constants(rule, numbers, steps[p], lr) of its parameters
/// and in the decision the gradients' scale, 1 / the sum of weights, and lr. Where a gradient of it is not finite, or ranks differ, this step's updates end instead: it
/// is skipped from here on, and so is what follows it.
cudaError_t begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables,
                       cudaStream_t stream);

/// As many thread blocks as are useful.
inline constexpr unsigned kAnyBlocks = ~0u;

/// The optimizer's pass over one run, in one launch of at most `most_blocks` thread blocks: reads gradient, weights and states once and writes each once. The
/// same bits as RuleOptimizer::step gives on the CPU. Of kLamb, directions are written in place of the weights (DeviceRun::direction). A parameter that is not used is left alone, but for its average.
/// Nothing happens if the decision is to skip.
/// REQUIRES: as DeviceRun; the group's buffers are aligned to 128 bytes: cudaErrorMisalignedAddress else.
cudaError_t update_step(const DeviceRun& run, const StepTables& tables, cudaStream_t stream,
                        unsigned most_blocks = kAnyBlocks);

/// What comes before whole matrices are made orthogonal (MuonMomentumRule): moves the run's momenta and writes directions over its
/// `arguments.master`, which may be the gradient. The same bits as MuonOptimizer::direction. Parameters that are not used are left alone.
/// REQUIRES: as update_step.
cudaError_t muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants, const StepTables& tables,
                            cudaStream_t stream);

/// Writes the run's masters to `masters` [numel], fp32, aligned to 16 bytes.
/// REQUIRES: as update_step.
cudaError_t read_weights(const DeviceRun& run, float* masters, cudaStream_t stream);

/// What lies in the place of the run's gradient are its new masters, of the parameters that are used, and averages move along. The same bits
/// as MasterAssigner::step. Nothing happens if the decision is to skip.
/// REQUIRES: as update_step.
cudaError_t assign_weights(const DeviceRun& run, const StepTables& tables, cudaStream_t stream);

/// Exchanges masters and averages of the parameters that some step has updated, as RuleOptimizer::swap_average.
/// REQUIRES: as update_step.
cudaError_t swap_averages(const DeviceRun& run, const StepTables& tables, cudaStream_t stream);

}  // namespace tessera::cuda
