#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// The tensors and numbers of a batch norm other than its weight and bias.
struct BatchNormState {
  at::Tensor mean, variance;  ///< [C]: running statistics, which training updates; they may be undefined
  double momentum = 0.1;      ///< weight of the new batch in the running statistics
  double eps = 1e-5;          ///< added to the variances
};

/// Normalises `input` [B, C, ...] with the mean and the biased variance over the batches of all ranks of `group`. Then
/// it scales by `weight` and shifts by `bias` ([C] each, or undefined). SyncBatchNorm calls it in training mode. The
/// result can be differentiated once; both forward and backward are collective. The function updates the running
/// statistics of `norm`, except while a forward is computed again (Recomputing).
///
/// Each rank sends the count, and each channel's mean and sum of squared deviations. These numbers are joined by Chan's
/// formula (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances",
/// 1979), in fp64. Backward sends the sums of dy and of dy * normalised x (Ioffe and Szegedy, arXiv 1502.03167, section
/// 3). Throws tessera::Error (64) on all ranks if the batches of all ranks together have fewer than two values in each
/// channel.
at::Tensor batch_norm_over_ranks(const at::Tensor& input, const at::Tensor& weight, const at::Tensor& bias,
                                 const BatchNormState& norm, const std::shared_ptr<Collectives>& group);

}  // namespace tessera
