#include "runtime/config/placement_rows.h"

#include <fmt/format.h>

#include <algorithm>

#include "runtime/base/text.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

bool has_all(const CutAxes& axes, const CutAxes& others) {
  return (axes.host || !others.host) && (axes.rank || !others.rank);
}

std::string text_of(const CutAxes& axes) { return "[" + joined(names_of_axes(axes)) + "]"; }

/// Returns the names of the rows that have these axes and free gathered parameters after use, as every "placement"
/// does.
std::string names_with(const PlacementAxes& axes) {
  std::vector<std::string> names;
  for (const PlacementRow& row : placement_rows()) {
    if (row.axes != axes || row.keeps_gathered) continue;
    names.push_back(name_of(row.strategy) + (row.over_world ? " with shard_over world" : ""));
  }
  return joined(names, " or ");
}

}  // namespace

const std::vector<PlacementRow>& placement_rows() {
  using enum ShardingStrategy;
  constexpr CutAxes kWhole{}, kRank{.rank = true}, kBoth{.host = true, .rank = true};
  static const std::vector<PlacementRow> rows = {
      {kNoShard, false, {kWhole, kWhole, kWhole}},
      {kShardOptimizer, false, {kWhole, kWhole, kRank}},
      {kShardGradients, false, {kWhole, kRank, kRank}},
      {kShardGradOp, false, {kRank, kRank, kRank}, /*keeps_gathered=*/true},
      {kFullShard, false, {kRank, kRank, kRank}},
      {kHybridShard, false, {kRank, kRank, kRank}},
      {kHybridShard, true, {kRank, kBoth, kBoth}},
  };
  return rows;
}

const PlacementRow& placement_row(ShardingStrategy strategy, bool over_world) {
  const bool world = over_world && strategy == ShardingStrategy::kHybridShard;
  const auto& rows = placement_rows();
  const auto row = std::ranges::find_if(
      rows, [&](const PlacementRow& each) { return each.strategy == strategy && each.over_world == world; });
  return row == rows.end() ? rows.front() : *row;
}

PlacementAxes placement_axes(const Strategy& strategy) {
  const PlacementConfig& given = strategy.placement;
  if (!given.is_given()) return placement_row(strategy.strategy, strategy.optimizer.shard_over_world).axes;
  return {given.parameters.value_or(CutAxes{}), given.gradients.value_or(CutAxes{}),
          given.optimizer.value_or(CutAxes{})};
}

std::vector<std::string> names_of_axes(const CutAxes& axes) {
  std::vector<std::string> names;
  if (axes.host) names.emplace_back(kHostAxis);
  if (axes.rank) names.emplace_back(kRankAxis);
  return names;
}

bool keeps_gathered(const Strategy& strategy) {
  return !strategy.placement.is_given() && placement_row(strategy.strategy, false).keeps_gathered;
}

bool releases_parameters(const Strategy& strategy) {
  return placement_axes(strategy).parameters.rank && !keeps_gathered(strategy);
}

bool holds_copies(const Strategy& strategy) {
  if (!placement_axes(strategy).parameters.rank) return true;
  return strategy.placement.is_given() ? strategy.mesh.replicas() != 1
                                       : strategy.strategy == ShardingStrategy::kHybridShard;
}

bool is_placed_as(const Strategy& strategy, ShardingStrategy name) {
  if (!strategy.placement.is_given()) return strategy.strategy == name;
  return placement_axes(strategy) == placement_row(name, false).axes && !placement_row(name, false).keeps_gathered;
}

std::string problem_of(const PlacementAxes& axes) {
  if (axes.parameters.host)
    return "parameters are cut over \"host\", and units are gathered over \"rank\" alone, inside hosts. [T0916] hint: "
           "take \"host\" out of parameters; gradients and optimizer may keep it";
  if (!has_all(axes.gradients, axes.parameters))
    return fmt::format(
        "parameters are cut over {} and gradients over {}: a rank would sum gradients of parameters that it does not "
        "hold. [T0917] hint: cut gradients over all axes of parameters, or parameters over fewer",
        text_of(axes.parameters), text_of(axes.gradients));
  if (!has_all(axes.optimizer, axes.gradients))
    return fmt::format(
        "gradients are cut over {} and optimizer over {}: a rank would update parameters whose gradients it does not "
        "hold. [T0918] hint: cut optimizer over all axes of gradients, or gradients over fewer",
        text_of(axes.gradients), text_of(axes.optimizer));
  return "";
}

std::string name_of_placement(const Strategy& strategy) {
  return strategy.placement.is_given() ? "placement by axes" : name_of(strategy.strategy);
}

std::string describe_placement(const Strategy& strategy) {
  const PlacementAxes axes = placement_axes(strategy);
  const std::string names = strategy.placement.is_given() ? names_with(axes) : "";
  return fmt::format("parameters {}{}, gradients {}, optimizer {}{}", text_of(axes.parameters),
                     keeps_gathered(strategy) ? " but gathered from forward to backward" : "", text_of(axes.gradients),
                     text_of(axes.optimizer), names.empty() ? "" : " (as " + names + ")");
}

}  // namespace tessera
