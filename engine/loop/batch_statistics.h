#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// The tensors and numbers of a batch norm beside its weight and bias.
struct BatchNormState {
  at::Tensor mean, variance;  ///< [C]: running statistics, updated while it trains, unless they are undefined
  double momentum = 0.1;      ///< the weight of the new batch
  double eps = 1e-5;          ///< added to the variances
};

/// Normalises `input` [B, C, ...] by the mean and the biased variance of the batches of all ranks of `group`, then
/// scales by `weight` and shifts by `bias` ([C] each, or undefined). SyncBatchNorm calls it while it trains. It can be
/// differentiated once; forward and backward are collective. It updates the running statistics of `norm` unless forward
/// is being computed again (Recomputing).
///
/// Each rank sends the count, and each channel's mean and sum of squared deviations. They are joined by Chan's formula
/// (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979), in
/// fp64. Backward sends the sums of dy and of dy * normalised x (Ioffe and Szegedy, arXiv 1502.03167, section 3).
/// Throws tessera::Error (64) on all ranks where the batches of all ranks together hold one value or none in each
/// channel.
at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const BatchNormState& norm, const std::shared_ptr<Collectives>& group);

}  // namespace tessera
