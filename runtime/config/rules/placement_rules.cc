#include <fmt/format.h>

#include <string>
#include <vector>

#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_table.h"

namespace tessera {
namespace {

StrategyRule one_name_rule(std::string key, std::string other, std::int64_t MeshConfig::*by_axis,
                           std::int64_t MeshConfig::*by_role) {
  return {{key, other},
          fmt::format("{} and {} are two names of one axis, of which a file gives one.", dotted(key), dotted(other)),
          [other, by_axis, by_role](const Strategy& s) -> std::string {
            if (s.mesh.*by_axis == 0 || s.mesh.*by_role == 0) return "";
            return fmt::format("is another name of {}. [T0922] hint: give one of the two", dotted(other));
          }};
}

}  // namespace

std::vector<StrategyRule> placement_rules() {
  return {
      {{"/placement/parameters", "/placement/gradients", "/placement/optimizer"},
       "placement.parameters, gradients and optimizer stand together.",
       [](const Strategy& s) -> std::string {
         const PlacementConfig& given = s.placement;
         if (!given.is_given() || (given.parameters && given.gradients && given.optimizer)) return "";
         return fmt::format(
             "\"placement\" lacks {}. [T0919] hint: give all three, with [] for what every rank holds whole",
             !given.parameters  ? "parameters"
             : !given.gradients ? "gradients"
                                : "optimizer");
       }},
      {{"/placement/parameters", "/placement/gradients", "/placement/optimizer"},
       "placement.parameters are not cut over host, placement.gradients have all axes of parameters, and "
       "placement.optimizer has all axes of gradients.",
       [](const Strategy& s) -> std::string {
         const PlacementConfig& given = s.placement;
         if (!given.parameters || !given.gradients || !given.optimizer) return "";
         return problem_of(placement_axes(s));
       }},
      // FULL_SHARD is the default, so it counts as left out: a resolved strategy has all keys.
      {{"/placement/parameters", "/placement/gradients", "/placement/optimizer", "/strategy"},
       "placement takes the place of strategy, which is left out.",
       [](const Strategy& s) -> std::string {
         if (!s.placement.is_given() || s.strategy == ShardingStrategy::kFullShard) return "";
         return fmt::format(
             "\"placement\" says by axes what \"strategy\" {} says by its name. [T0920] hint: give one or the other",
             name_of(s.strategy));
       }},
      {{"/placement/optimizer", "/optimizer/shard_over"},
       "placement goes without optimizer.shard_over world.",
       [](const Strategy& s) -> std::string {
         if (!s.placement.is_given() || !s.optimizer.shard_over_world) return "";
         return "\"placement\" says over which axes the optimizer is cut. [T0921] hint: leave shard_over out, and give "
                "gradients and optimizer [\"host\", \"rank\"]";
       }},
      one_name_rule("/mesh/host", "/mesh/replicate", &MeshConfig::host, &MeshConfig::replicate),
      one_name_rule("/mesh/rank", "/mesh/shard", &MeshConfig::rank, &MeshConfig::shard),
      {{"/secondary/form", "/strategy", "/placement/parameters"},
       "secondary.form other than none goes with strategy FULL_SHARD and HYBRID_SHARD.",
       [](const Strategy& s) -> std::string {
         if (!s.secondary.is_used() || releases_parameters(s)) return "";
         return fmt::format(
             "under {} no unit is gathered twice in a step, so a second copy would serve nobody. [T0985] hint: leave "
             "\"secondary\" out, or take FULL_SHARD (or by \"placement\" cut parameters over \"rank\")",
             name_of_placement(s));
       }},
      {{"/secondary/form", "/offload/parameters/tier"},
       "secondary.form other than none needs offload.parameters in memory.",
       [](const Strategy& s) -> std::string {
         if (!s.secondary.is_used() || s.offload.parameters.tier == Tier::kMemory) return "";
         return "a second copy is in memory, and takes more of it than the parts that \"offload\" moves below. "
                "[T0986] hint: leave \"secondary\" out, or parameters in \"memory\"";
       }}};
}

}  // namespace tessera
