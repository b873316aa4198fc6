#include "engine/step/publisher.h"

#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

void Publisher::publish(FlatGroup& group) {
  if (behind_) return behind_->start(group);
  const Placement& placement = plan_.placement();
  const bool over_replicas = placement.optimizer.replicate && axes_.replicate_size > 1;
  const bool over_shards = placement.optimizer.shard && !placement.parameters.shard && axes_.shard_size > 1;
  if (!over_replicas && !over_shards) return;
  const Span span("publish", group.unit->name, &seconds_);
  if (placement.optimizer.replicate_first) return gather_shards_first(group, over_replicas, over_shards);
  const std::int64_t element = group.element_bytes();
  if (over_replicas) {
    const Extent outer = owned({placement.optimizer.shard, false}, plan_.placement().mesh, group.layout.numel());
    std::byte* base = group.shard + (outer.offset - group.parameter_part.offset) * element;
    const std::int64_t bytes = group.optimizer_part.numel * element;
    throw_if_error(axes_.replicate
                       ->all_gather(group.unit->name, group.updated(), base, bytes,
                                    {.dtype = group.dtype, .form = plan_.wire().replica_gathers})
                       .wait());
  }
  if (over_shards) {
    const std::int64_t part = group.layout.numel() / axes_.shard_size;
    const std::byte* mine = group.full + axes_.shard_index * part * element;
    under_way_.push_back(axes_.gather->all_gather(group.unit->name, mine, group.full, part * element,
                                                  {.dtype = group.dtype, .form = plan_.wire().gathers}));
    if (under_way_.size() <= Collectives::kMostUnderWay) return;
    throw_if_error(under_way_.front().wait());
    under_way_.pop_front();
  }
}

/// Gathers a buffer that each rank is to hold whole. The ranks of a replica have updated the parts of one piece of the
/// buffer. That piece is gathered first.
void Publisher::gather_shards_first(FlatGroup& group, bool over_replicas, bool over_shards) {
  const PlannedWire& wire = plan_.wire();
  const std::int64_t element = group.element_bytes();
  const Extent piece = owned({.shard = false, .replicate = true}, plan_.placement().mesh, group.layout.numel());
  std::byte* const base = group.full + piece.offset * element;
  if (over_shards) {
    throw_if_error(axes_.gather
                       ->all_gather(group.unit->name, group.updated(), base, group.optimizer_part.numel * element,
                                    {.dtype = group.dtype, .form = wire.gathers})
                       .wait());
  }
  if (over_replicas) {
    throw_if_error(axes_.replicate
                       ->all_gather(group.unit->name, base, group.full, piece.numel * element,
                                    {.dtype = group.dtype, .form = wire.replica_gathers})
                       .wait());
  }
}

void Publisher::wait() {
  const Timed timed(under_way_.empty() ? nullptr : waits_);
  for (Work& work : under_way_) {
    const Span span("publish", {}, &seconds_);
    throw_if_error(work.wait());
  }
  under_way_.clear();
}

void Publisher::meet() {
  const Span span("publish", {}, &seconds_);
  throw_if_error(axes_.gather->barrier("updated parameters").wait());
}

}  // namespace tessera
