#pragma once

#include <cstdint>

#include "planner/measured/links.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// A reduction of a trainable group's gradients over the shard axis: a reduce-scatter where gradients are cut, else an
/// all-reduce.
///
/// What a rank sends to another one is its contribution to that one's part, in the bucket's dtype or in fewer bits; in
/// an all-reduce, the sum of its own part too: in fp32 (on a GPU in the bucket's dtype), or in fewer bits. PowerSGD is
/// two all-reduces of factors, random-k one of fewer elements; top-k, EF-signSGD, QSGD and TernGrad are an all-gather; votes and one_bit go
/// to owners and back, as an all-reduce does. What ranks compute for those methods (factors, selection, encoding) is not in the cost; what
/// they do for fewer bits is (form_cost.h).
CallCost shard_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// And of what that leaves, in fp32, over the replicate axis.
CallCost replicate_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// What ranks tell each other of a unit that is updated in backward, over an axis of `ranks` ranks.
CallCost notes_cost(const MemoryPlan& plan, int ranks, const Links& links);

}  // namespace tessera
