#pragma once

#include <cstdint>

#include "sharding/layout/memory_plan.h"
#include "sharding/timing/links.h"

namespace tessera {

/// Bytes of `numel` elements as they are sent: in `form`, or as they are, in `dtype`. Lossy forms are those of
/// runtime/comm/sum/wire_codec.h: an fp32 scale for every 256 elements, and a byte or half a byte an element, to a
/// multiple of 4. Packed ones (lossless.h) have the size that a normal distribution gives: 0.853 of fp32's
/// bytes, 0.70 of bf16's; that short messages are not packed is not looked at.
std::int64_t bytes_on_wire(WireForm form, DType dtype, std::int64_t numel);

/// A reduction of a trainable group's gradients over the shard axis: a reduce-scatter where gradients are cut, else an
/// all-reduce.
///
/// What a rank sends to another one is its contribution to that one's part, in the bucket's dtype or in fewer bits; in
/// an all-reduce, the sum of its own part too: in fp32 (on a GPU in the bucket's dtype), or in fewer bits. PowerSGD is
/// two all-reduces of factors, random-k one of fewer elements; top-k, EF-signSGD, QSGD and TernGrad are an all-gather; votes and one_bit go
/// to owners and back, as an all-reduce does. What ranks compute for it (factors,
/// selection, encoding) is not in the cost.
CallCost shard_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// And of what that leaves, in fp32, over the replicate axis.
CallCost replicate_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// What ranks tell each other of a unit that is updated in backward, over an axis of `ranks` ranks.
CallCost notes_cost(const MemoryPlan& plan, int ranks, const Links& links);

}  // namespace tessera
