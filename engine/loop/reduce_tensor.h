#pragma once

#include <ATen/core/Tensor.h>

#include "runtime/comm/collectives.h"
#include "tessera/collectives.h"

namespace tessera {

/// [ranks, numel of `part`]: the values of each rank's `part`, which is contiguous and on the CPU.
at::Tensor gather_over_ranks(Collectives& group, const at::Tensor& part);

/// `flat` [numel] of all ranks as one, in the dtype it has, on the CPU; the same bits on every rank. Sums are made by a tree
/// over neighbours, those of bf16 and fp16 in fp32. Large tensors are cut into a part a rank, so that each adds up its own;
/// that takes two more tensors of this size. REQUIRES: equal sizes and dtypes on all ranks (expect_same_call).
at::Tensor reduce_over_ranks(Collectives& group, const at::Tensor& flat, Reduce operation);

}  // namespace tessera
