#include "runtime/engine/update.h"

#include <algorithm>

#include "runtime/base/trace.h"
#include "tessera/error.h"

namespace tessera {

Update::Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
               const MeshAxes& axes)
    : units_(units), optimizer_(optimizer), plan_(plan), axes_(axes) {
  std::size_t count = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) { count += group.parameters.size(); });
  steps_.resize(count, 0);
}

void Update::apply(float gradient_scale, float lr, const std::vector<char>& used) {
  const Span span("update");
  std::size_t first = 0;
  for_each_trainable(units_, [&](FlatGroup& group) {
    update_group(group, {gradient_scale, lr, 0}, &steps_[first], &used[first]);
    publish(group);
    first += group.parameters.size();
  });
  if (!plan_.input().placement.shared) return;
  const Span wait("publish", {}, &publish_seconds_);
  throw_if_error(axes_.gather->barrier("updated parameters").wait());
}

void Update::update_group(FlatGroup& group, StepScalars scalars, std::int64_t* steps, const char* used) {
  const std::size_t count = group.parameters.size();
  for (std::size_t i = 0; i < count; ++i) steps[i] += used[i] ? 1 : 0;
  const bool as_one = std::all_of(used, used + count, [](char u) { return u != 0; }) &&
                      std::all_of(steps, steps + count, [&](std::int64_t s) { return s == steps[0]; });
  if (as_one) {
    scalars.step = steps[0];
    update_run(group, scalars, group.optimizer_part);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!used[i]) continue;
    scalars.step = steps[i];
    const Extent run = intersect(group.layout.extent(i), group.optimizer_part);
    if (run.numel > 0) update_run(group, scalars, run);
  }
}

void Update::update_run(FlatGroup& group, const StepScalars& scalars, Extent run) {
  const std::int64_t in_part = run.offset - group.optimizer_part.offset;
  const auto numel = static_cast<std::size_t>(run.numel);
  OptimizerSlice slice;
  slice.gradient = {group.gradient + (run.offset - group.gradient_part.offset), numel};
  slice.master_kind = group.master_kind;
  if (group.master) slice.master = {group.master + in_part, numel};
  if (group.master_low) slice.low = {group.master_low + in_part, numel};
  if (group.dtype != DType::kF32) {
    slice.parameter = group.updated() + in_part * group.element_bytes();
    slice.parameter_dtype = group.dtype;
  }
  if (optimizer_.num_states() > 0) slice.state0 = state_of(group.state[0], in_part, run.numel);
  if (optimizer_.num_states() > 1) slice.state1 = state_of(group.state[1], in_part, run.numel);
  slice.first_element = static_cast<std::uint64_t>(run.offset);
  slice.stream = static_cast<std::uint64_t>(group.unit->index) << 32 | group.index;
  optimizer_.step(scalars, slice);
}

StateSlice Update::state_of(const FlatGroup::State& state, std::int64_t begin, std::int64_t numel) const {
  const StateDType dtype = plan_.input().state_dtype;
  const StateBytes before = state_bytes(dtype, begin), size = state_bytes(dtype, numel);
  StateSlice slice;
  slice.data = {state.data + before.data, static_cast<std::size_t>(size.data)};
  if (state.scales) slice.scales = {state.scales + before.scales / 4, static_cast<std::size_t>(size.scales / 4)};
  return slice;
}

/// Where the optimizer is cut finer than the parameters are, owners' parts go to the ranks that hold copies: over the
/// replicate axis first, since its parts lie inside those of the shard axis. Ranks that share one copy only wait for
/// each other, once, in `apply`.
void Update::publish(FlatGroup& group) {
  const Placement& placement = plan_.input().placement;
  const bool over_replicas = placement.optimizer.replicate && axes_.replicate_size > 1;
  const bool over_shards = placement.optimizer.shard && !placement.parameters.shard && axes_.shard_size > 1;
  if (!over_replicas && !over_shards) return;
  const Span span("publish", group.unit->name, &publish_seconds_);
  const std::int64_t element = group.element_bytes();
  if (over_replicas) {
    const Extent outer = owned({placement.optimizer.shard, false}, plan_.input().mesh, group.layout.numel());
    std::byte* base = group.shard + (outer.offset - group.parameter_part.offset) * element;
    const std::int64_t bytes = group.optimizer_part.numel * element;
    throw_if_error(axes_.replicate->all_gather(group.unit->name, group.updated(), base, bytes).wait());
  }
  if (over_shards) {
    const std::int64_t part = group.layout.numel() / axes_.shard_size;
    const std::byte* mine = group.full + axes_.shard_index * part * element;
    throw_if_error(axes_.gather->all_gather(group.unit->name, mine, group.full, part * element).wait());
  }
}

}  // namespace tessera
