#pragma once

// See docs/glossary.md: unit.

#include "planner/measured/links.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Returns the cost of a reduction of a trainable group's gradients over the shard axis: a reduce-scatter where
/// gradients are cut, else an all-reduce.
///
/// A rank sends each other rank a contribution to the part of that rank, in the bucket's dtype or in fewer bits. In an
/// all-reduce it also sends the sum of its own part, in fp32 (on a GPU: the bucket's dtype) or in fewer bits. A method
/// of compression costs as much as its messages (MethodLayout). The cost leaves out what ranks compute for methods
/// (factors, selection, encoding), but includes the time of codecs with fewer bits (form_cost.h).
CallCost shard_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// Returns the cost of reducing the result of shard_reduction_cost, in fp32, over the replicate axis.
CallCost replicate_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// Returns the cost of the notes about a unit that is updated in backward, over an axis of `ranks` ranks.
CallCost notes_cost(const MemoryPlan& plan, int ranks, const Links& links);

}  // namespace tessera
