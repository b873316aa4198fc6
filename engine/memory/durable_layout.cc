#include <nlohmann/json.hpp>

#include "engine/memory/durable_files.h"
#include "runtime/config/strategy_names.h"
#include "sharding/whole_tensors.h"

namespace tessera {
namespace {

nlohmann::json layout_of(const FlatGroup& group) {
  nlohmann::json json = {{"dtype", name_of(group.dtype)}, {"trains", group.trainable}, {"numel", group.layout.numel()}};
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const FlatParameter& parameter = group.parameters[i];
    const Extent place = group.layout.extent(i);
    json["parameters"].push_back({parameter.name, parameter.sizes, parameter.number, place.offset, place.numel});
    for_each_tensor_state(group, i, [&](const TensorState& state, Extent lies) {
      json["tensor_states"].push_back({state.name, state.sizes, lies.offset});
    });
  }
  return json;
}

}  // namespace

std::string durable_layout(const MemoryPlan& plan, const std::vector<std::unique_ptr<Unit>>& units,
                           const torch::nn::Module& module, const Strategy& strategy) {
  const PlannedPlacement& placement = plan.placement();
  const MeshPosition& mesh = placement.mesh;
  const PlannedTiers& tiers = plan.tiers();
  const PlannedUpdate& update = plan.update();
  const auto axes = [](AxisPlacement cut) { return nlohmann::json{cut.shard, cut.replicate}; };
  const auto share = [](const OffloadedState& state) {
    return nlohmann::json(state.tier == Tier::kNvme ? state.fraction : 0.0);
  };
  const auto formats = [](const StateFormats& states) {
    nlohmann::json json = nlohmann::json::array();
    for (const StateDType state : states) json.push_back(static_cast<int>(state));
    return json;
  };
  nlohmann::json json = {
      {"mesh", {mesh.replicate_size, mesh.shard_size, mesh.replicate_index, mesh.shard_index}},
      {"placement", {axes(placement.parameters), axes(placement.gradients), axes(placement.optimizer)}},
      {"in_place", {placement.keep_gathered, placement.shared}},
      {"master", static_cast<int>(update.master)},
      {"states", {formats(update.states), formats(update.matrix_states)}},
      {"below", {share(tiers.parameters), share(tiers.masters), share(tiers.moments)}},
      {"records", {tiers.record_bytes, tiers.cache_bytes}},
      {"optimizer", {name_of(strategy.optimizer.type), strategy.ema.decay > 0}},
      {"directories", strategy.offload.paths}};
  const auto on_host = [](const OffloadedState& state) { return state.tier == Tier::kHost ? state.fraction : 0.0; };
  if (on_host(tiers.parameters) + on_host(tiers.masters) + on_host(tiers.moments) > 0)
    json["on_host"] = {on_host(tiers.parameters), on_host(tiers.masters), on_host(tiers.moments)};
  const CompressionMethod& method = plan.wire().compression.method;
  if (const double momentum = momentum_of_residuals(method); momentum > 0) json["kept_momentum"] = momentum;
  if (plan.records().states.cached + plan.records().parameters.cached > 0) json["cached"] = "spread evenly";
  if (placement.is_queued) json["gpu"] = true;
  if (kept_gradient_bytes(plan) > 0) {
    const auto* const factors = std::get_if<PowerSgdConfig>(&method);
    const auto* const largest = std::get_if<TopKConfig>(&method);
    json["kept_gradients"] = {factors ? factors->rank : 0, method.index(), largest && largest->momentum > 0,
                              plan.wire().compressed_shard_part, plan.wire().compressed_replicate_part};
  }
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) json["groups"].push_back(layout_of(*group));
  }
  for (const auto& item : whole_tensors(module, strategy.units)) {
    const at::Tensor& buffer = item.value();
    json["buffers"].push_back({item.key(), static_cast<int>(buffer.scalar_type()), buffer.sizes().vec()});
  }
  return json.dump();
}

}  // namespace tessera
