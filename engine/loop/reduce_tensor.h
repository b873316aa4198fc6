#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/comm/collectives.h"
#include "tessera/collectives.h"

namespace tessera {

/// Gathers `part` of every rank: [ranks, numel of `part`] on the CPU. It is collective. REQUIRES: `part` is contiguous
/// and on the CPU, and has one size and dtype on all ranks. Throws the group's tessera::Errors.
at::Tensor gather_over_ranks(Collectives& group, const at::Tensor& part);

/// Reduces `flat` [numel] over all ranks, in its dtype, on the CPU. The result has the same bits on every rank. The
/// call is collective. Sums are made by a tree over neighbours; bf16 and fp16 are added in fp32. A large tensor is cut
/// into one part for each rank, and each rank reduces its part. The reduction of a large tensor needs memory for two
/// more tensors of its size. REQUIRES: equal sizes and dtypes on all ranks (expect_same_call). Throws the group's
/// tessera::Errors.
at::Tensor reduce_over_ranks(Collectives& group, const at::Tensor& flat, Reduce operation);

}  // namespace tessera
