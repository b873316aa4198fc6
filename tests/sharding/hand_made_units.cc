#include "hand_made_units.h"

#include <cstring>

#include "runtime/border/throw.h"
#include "sharding/unrecorded.h"

namespace tessera::testing {

HandMadeUnits::HandMadeUnits(const Mesh& mesh, const Options& options) {
  const int shard = mesh.world_size() / options.replicate;
  axes_ = value_or_throw(MeshGroups::of(mesh).axes(options.replicate, shard));
  PlanInput input;
  input.placement = placement_of(options.strategy, /*optimizer_over_world=*/false);
  input.placement.mesh = {options.replicate, shard, axes_.replicate_index, axes_.shard_index};
  input.placement.prefetch = options.prefetch;
  input.wire.accumulation = options.accumulation;
  input.wire.reduce = options.reduce;
  input.wire.sync = options.sync;
  input.update.in_backward = options.updates_in_backward;
  for (std::size_t u = 0; u < options.sizes.size(); ++u) {
    units_.push_back(std::make_unique<Unit>(static_cast<int>(u), "unit " + std::to_string(u)));
    make(u, options);
    input.units.push_back(units_.back()->shape());
  }
  plan_ = MemoryPlan(std::move(input));
  const MemoryUse& use = plan_.use();
  parameters_ = Arena::shared("parameters", use[MemoryCategory::kParameters], *axes_.gather);
  slots = Arena::plain("slots", use[MemoryCategory::kSlots]);
  Arena& gradients = options.updates_in_backward ? sums : gradients_;
  gradients = Arena::shared("gradients", use[MemoryCategory::kGradients], *axes_.reduce);
  buckets = Arena::shared("buckets", use[MemoryCategory::kBuckets], *axes_.reduce);
  scratch = Arena::plain("scratch", use[MemoryCategory::kStaging]);
  for (const auto& unit : units_) place(*unit->groups[0]);
  parameters_.expect_full();
  gradients_.expect_full();
}

void HandMadeUnits::make(std::size_t u, const Options& options) {
  Unit& unit = *units_[u];
  FlatGroup& group = *unit.groups.emplace_back(std::make_unique<FlatGroup>());
  group.unit = &unit;
  std::vector<std::int64_t> numels;
  for (std::size_t i = 0; i < options.sizes[u].size(); ++i) {
    const at::Tensor tensor = values_of(u, i, options.sizes[u][i]).requires_grad_();
    FlatParameter parameter{
        tensor,        unit.name + ".parameter " + std::to_string(i), {}, tensor.sizes().vec(), tensor.strides().vec(),
        tensor.numel()};
    group.parameters.push_back(std::move(parameter));
    numels.push_back(tensor.numel());
  }
  const Placement placement = placement_of(options.strategy, false);
  const int shard = axes_.shard_size;
  group.layout = Layout::pack(numels, parts_of(placement, {options.replicate, shard, 0, 0}));
}

void HandMadeUnits::place(FlatGroup& group) {
  const Unrecorded unrecorded;
  const PlannedPlacement& placement = plan_.placement();
  const std::int64_t numel = group.layout.numel();
  group.parameter_part = owned(placement.parameters, placement.mesh, numel);
  group.gradient_part = owned(placement.gradients, placement.mesh, numel);
  group.optimizer_part = owned(placement.optimizer, placement.mesh, numel);
  const bool whole = group.parameter_part.numel == numel;
  const bool in_place = whole || placement.keep_gathered;
  std::byte* const memory = parameters_.take((in_place ? numel : group.parameter_part.numel) * 4);
  group.shard = in_place ? memory + group.parameter_part.offset * 4 : memory;
  if (!plan_.update().in_backward) {
    group.gradient = reinterpret_cast<float*>(gradients_.take(group.gradient_part.numel * 4));
  }
  group.make_storage();

  const at::Tensor flat = at::zeros({numel});
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const FlatParameter& parameter = group.parameters[i];
    const at::Tensor place = flat.as_strided(parameter.sizes, parameter.strides, group.layout.extent(i).offset);
    place.copy_(parameter.tensor.detach());
  }
  std::memcpy(group.shard, flat.const_data_ptr<float>() + group.parameter_part.offset, group.parameter_part.numel * 4);
  if (whole) group.attach(memory);
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    rebase(group.parameters[i], group, group.layout.extent(i).offset);
  }
  if (!whole) group.attach(nullptr);
  if (whole) group.unit->become(Unit::State::kGathered);
}

at::Tensor HandMadeUnits::values_of(std::size_t u, std::size_t i, at::IntArrayRef sizes) {
  at::Tensor values = at::empty(sizes);
  float* const data = values.mutable_data_ptr<float>();
  for (std::int64_t k = 0; k < values.numel(); ++k) {
    data[k] = 1000.0f * static_cast<float>(u) + 100.0f * static_cast<float>(i) + 0.25f * static_cast<float>(k);
  }
  return values;
}

void HandMadeUnits::change_shards(float amount) {
  for (const auto& unit : units_) {
    const FlatGroup& group = *unit->groups[0];
    auto* const shard = reinterpret_cast<float*>(group.shard);
    for (std::int64_t i = 0; i < group.parameter_part.numel; ++i) shard[i] += amount;
  }
}

HandMadeUnits::Options some_units(std::size_t count, ShardingStrategy strategy) {
  HandMadeUnits::Options options;
  options.strategy = strategy;
  for (std::size_t u = 0; u < count; ++u) {
    const auto width = static_cast<std::int64_t>(u == 0 ? 9 : 20 + u);
    options.sizes.push_back({{width, 33}, {width}});
  }
  return options;
}

}  // namespace tessera::testing
