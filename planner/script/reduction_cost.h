#pragma once

// See docs/glossary.md: unit.

#include "planner/measured/links.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {

/// Returns the cost of a reduction of a trainable group's gradients over the shard axis: a reduce-scatter if gradients
/// are cut, else an all-reduce.
///
/// A rank sends each other rank a contribution to the part of that rank, in the bucket's dtype or in fewer bits. If the
/// reduction is an all-reduce, the rank also sends the sum of its own part, in fp32 (on a GPU: the bucket's dtype) or
/// in fewer bits. A compression method costs as much as its messages (MethodLayout). The computation of such methods
/// (factors, selection, encoding) is not counted, but the time of codecs with fewer bits is (form_cost.h).
CallCost shard_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// Returns the cost of the reduction over the replicate axis, in fp32, that follows the reduction over the shard axis.
CallCost replicate_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links);

/// Returns the cost, over an axis of `ranks` ranks, of the messages about a unit that is updated in backward.
CallCost notes_cost(const MemoryPlan& plan, int ranks, const Links& links);

}  // namespace tessera
