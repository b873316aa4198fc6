#include "engine/step/publisher.h"

#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

void Publisher::publish(FlatGroup& group) {
  if (behind_) return behind_->start(group);
  const Placement& placement = plan_.input().placement;
  const bool over_replicas = placement.optimizer.replicate && axes_.replicate_size > 1;
  const bool over_shards = placement.optimizer.shard && !placement.parameters.shard && axes_.shard_size > 1;
  if (!over_replicas && !over_shards) return;
  const Span span("publish", group.unit->name, &seconds_);
  const std::int64_t element = group.element_bytes();
  if (over_replicas) {
    const Extent outer = owned({placement.optimizer.shard, false}, plan_.input().mesh, group.layout.numel());
    std::byte* base = group.shard + (outer.offset - group.parameter_part.offset) * element;
    const std::int64_t bytes = group.optimizer_part.numel * element;
    throw_if_error(axes_.replicate
                       ->all_gather(group.unit->name, group.updated(), base, bytes,
                                    {.dtype = group.dtype, .form = plan_.input().replica_gathers})
                       .wait());
  }
  if (over_shards) {
    const std::int64_t part = group.layout.numel() / axes_.shard_size;
    const std::byte* mine = group.full + axes_.shard_index * part * element;
    under_way_.push_back(axes_.gather->all_gather(group.unit->name, mine, group.full, part * element,
                                                  {.dtype = group.dtype, .form = plan_.input().gathers}));
    if (under_way_.size() <= Collectives::kMostUnderWay) return;
    throw_if_error(under_way_.front().wait());
    under_way_.pop_front();
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
