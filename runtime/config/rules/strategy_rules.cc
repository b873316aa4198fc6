#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "runtime/base/seeded_fault.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"
#include "runtime/config/strategy_table.h"

// This file has the rules between keys. Each row of `make_rules` is one StrategyRule: the keys that it reads, the
// sentence for the reference page, and a function that returns what is wrong and what to do. The rows are in the order
// of the page, and the helpers that several rows share come before them.

namespace tessera {
namespace {

/// Returns whether ranks have several microbatches in a step. "deal.microbatches" replaces gradient_accumulation, which
/// is then 1.
bool has_microbatches(const Strategy& s) { return s.gradient_accumulation > 1 || s.deal.microbatches > 0; }

StrategyRule momentum_rule(const char* name, std::function<bool(const OptimizerConfig&)> is_given) {
  return {{fmt::format("/optimizer/{}", name), "/optimizer/momentum", "/optimizer/type"},
          fmt::format("optimizer.{} needs momentum above 0.", name),
          [is_given](const Strategy& s) -> std::string {
            const OptimizerConfig& optimizer = s.optimizer;
            const bool applies = has(optimizer.type, optimizer_traits::kNesterov) && is_given(optimizer);
            return applies && optimizer.momentum == 0
                       ? "goes with momentum. [T0525] hint: give \"momentum\" above 0, such as 0.9"
                       : "";
          }};
}

bool needs_total_steps(LrScheduleType type) {
  using enum LrScheduleType;
  return type == kLinear || type == kCosine || type == kOneCycle || type == kWsd;
}

std::string problem_of_group(const ParameterGroup& group, const Strategy& s) {
  if (group.match.empty())
    return "has an empty \"match\", which fits nothing. [T0551] hint: leave it out to mean all parameters";
  const auto missing = [&](const char* name) {
    return fmt::format("has {}, which {} does not have. [T0552] hint: leave it out", name, name_of(s.optimizer.type));
  };
  if (group.eps && !has(s.optimizer.type, optimizer_traits::kEps)) return missing("eps");
  if (group.betas && !has(s.optimizer.type, optimizer_traits::kBetas)) return missing("betas");
  if (group.type && !has(s.optimizer.type, optimizer_traits::kMatrices)) return missing("type");
  if (group.type && *group.type != OptimizerType::kAdamW && *group.type != s.optimizer.type) {
    return fmt::format("has type {}, where optimizer.type is {}. [T0553] hint: give it that or adamw",
                       name_of(*group.type), name_of(s.optimizer.type));
  }
  if (!group.layer_adaptation && !adapts_layers(s.optimizer.type)) return missing("layer_adaptation");
  return "";
}

/// Makes a check that optimizer.in_backward is not used with a setting under which updates must wait for the end of
/// backward, or may have to be undone.
StrategyRule in_backward_rule(std::string other, std::string what, std::function<bool(const Strategy&)> holds,
                              const char* why) {
  return {{"/optimizer/in_backward", std::move(other)},
          fmt::format("optimizer.in_backward goes without {}: {}.", what, why),
          [holds, what, why](const Strategy& s) -> std::string {
            if (!s.optimizer.in_backward || !holds(s)) return "";
            return fmt::format("cannot stand beside {}: {}. [T0561] hint: leave one of them out", what, why);
          }};
}

StrategyRule in_backward_accumulation_rule() {
  StrategyRule rule = in_backward_rule("/gradient_accumulation", "gradient_accumulation above 1", has_microbatches,
                                       "each backward would be a step of its own");
  rule.keys.emplace_back("/deal/microbatches");
  return rule;
}

std::vector<StrategyRule> make_rules() {
  std::vector<StrategyRule> rules = {
      {{"/mesh/replicate", "/mesh/host", "/strategy", "/placement/parameters"},
       "mesh.replicate above 1 with FULL_SHARD is HYBRID_SHARD, and must be called so. (With the other strategies "
       "each replica shards what the strategy says within itself.)",
       [](const Strategy& s) -> std::string {
         const int most = seeded_fault(SeededFault::kTwoReplicasOfFullShard) ? 2 : 1;
         const bool is_named = !s.placement.is_given() && s.strategy == ShardingStrategy::kFullShard;
         if (s.mesh.replicas() <= most || !is_named) return "";
         return fmt::format(
             "{} replicas of FULL_SHARD are HYBRID_SHARD. [T0519] hint: write \"strategy\": \"HYBRID_SHARD\", or "
             "leave \"mesh\" out",
             s.mesh.replicas());
       }},
      {{"/units/min_numel", "/units/classes", "/units/modules"},
       "units.min_numel stands alone: it finds the units itself, so units.classes and units.modules stay empty.",
       [](const Strategy& s) -> std::string {
         if (s.units.min_numel == 0 || (s.units.classes.empty() && s.units.modules.empty())) return "";
         return "cannot stand beside classes or modules: it finds the units itself. [T0520] hint: give one or the "
                "other";
       }},
      {{"/units/bucket_cap_mb", "/strategy", "/placement/parameters"},
       "units.bucket_cap_mb needs strategy NO_SHARD: a bucket is of gradients that every rank keeps whole.",
       [](const Strategy& s) -> std::string {
         if (!s.units.bucket_cap_mb || is_placed_as(s, ShardingStrategy::kNoShard)) return "";
         return fmt::format(
             "buckets need \"strategy\": \"NO_SHARD\", got {}. [T0521] hint: leave bucket_cap_mb out, and name "
             "units in classes",
             name_of_placement(s));
       }},
      {{"/units/bucket_cap_mb", "/units/classes", "/units/modules", "/units/min_numel"},
       "units.bucket_cap_mb stands alone: buckets are the units, so classes and modules stay empty, and min_numel 0.",
       [](const Strategy& s) -> std::string {
         const UnitsConfig& units = s.units;
         const bool others = !units.classes.empty() || !units.modules.empty() || units.min_numel > 0;
         if (!units.bucket_cap_mb || !others) return "";
         return "cannot stand beside classes, modules or min_numel: buckets are the units. [T0522] hint: give one "
                "or the other";
       }},
      {{"/mixed_precision/reduce", "/mixed_precision/param"},
       "mixed_precision.reduce fp16 needs param fp16: only then is the loss scaled, without which small gradients "
       "vanish.",
       [](const Strategy& s) -> std::string {
         const MixedPrecisionConfig& mixed = s.mixed_precision;
         if (mixed.reduce != DType::kF16 || mixed.param == DType::kF16) return "";
         return fmt::format(
             "fp16 needs \"param\": \"fp16\", got {}: without loss scaling small gradients vanish. [T0523] hint: "
             "take bf16 or fp32",
             name_of(mixed.param));
       }},
      {{"/mixed_precision/loss_scale/minimum", "/mixed_precision/loss_scale/initial",
        "/mixed_precision/loss_scale/dynamic"},
       "loss_scale.minimum is at most loss_scale.initial.",
       [](const Strategy& s) -> std::string {
         const LossScaleConfig& scale = s.mixed_precision.loss_scale;
         if (!scale.dynamic || scale.minimum <= scale.initial) return "";
         return fmt::format(
             "{} is above the initial scale of {}. [T0524] hint: raise \"initial\", or lower \"minimum\"",
             scale.minimum, scale.initial);
       }},
      momentum_rule("nesterov", [](const OptimizerConfig& optimizer) { return optimizer.nesterov; }),
      momentum_rule("dampening", [](const OptimizerConfig& optimizer) { return optimizer.dampening != 0; }),
      {{"/optimizer/nesterov", "/optimizer/dampening", "/optimizer/type"},
       "optimizer.nesterov needs dampening 0.",
       [](const Strategy& s) -> std::string {
         const OptimizerConfig& optimizer = s.optimizer;
         const bool applies = has(optimizer.type, optimizer_traits::kDampening) && optimizer.nesterov;
         if (!applies || optimizer.dampening == 0) return "";
         return fmt::format("goes without dampening, which is {}. [T0526] hint: leave \"dampening\" out",
                            optimizer.dampening);
       }},
      {{"/optimizer/state_dtype", "/optimizer/type", "/optimizer/momentum"},
       "optimizer.state_dtype bf16 and 8bit need a state, so not sgd or lars without momentum.",
       [](const Strategy& s) -> std::string {
         const OptimizerConfig& optimizer = s.optimizer;
         if (keeps_states(optimizer) || optimizer.state_dtype == StateDType::kF32) return "";
         return fmt::format("{} without momentum keeps no state. [T0527] hint: leave state_dtype out",
                            name_of(optimizer.type));
       }},
      {{"/optimizer/state_dtype", "/optimizer/type"},
       "optimizer.type own, own_matrix and adafactor need state_dtype fp32: the rule computes with its states as they "
       "are kept.",
       [](const Strategy& s) -> std::string {
         const OptimizerType type = s.optimizer.type;
         const bool needs = type == OptimizerType::kOwn || has(type, optimizer_traits::kTensorStates);
         if (!needs || s.optimizer.state_dtype == StateDType::kF32) return "";
         return fmt::format("{} needs \"state_dtype\": \"fp32\", got {}. [T0528] hint: leave state_dtype out",
                            name_of(type), name_of(s.optimizer.state_dtype));
       }},
      {{"/optimizer/centered", "/optimizer/state_dtype", "/optimizer/type"},
       "optimizer.centered needs state_dtype fp32: it subtracts two numbers that are nearly equal.",
       [](const Strategy& s) -> std::string {
         const OptimizerConfig& optimizer = s.optimizer;
         const bool applies = has(optimizer.type, optimizer_traits::kCentered) && optimizer.centered;
         if (!applies || optimizer.state_dtype == StateDType::kF32) return "";
         return fmt::format("needs \"state_dtype\": \"fp32\", got {}. [T0529] hint: leave state_dtype out",
                            name_of(optimizer.state_dtype));
       }},
      {{"/gradient_clip_value", "/gradient_clipping"},
       "gradient_clip_value and gradient_clipping are not given together.",
       [](const Strategy& s) -> std::string {
         if (s.gradient_clip_value == 0 || s.gradient_clipping == 0) return "";
         return "cannot stand beside gradient_clipping. [T0530] hint: give one or the other";
       }},
      {{"/lr_schedule/type", "/lr_schedule/total_steps"},
       "lr_schedule.type linear, cosine, one_cycle and wsd need total_steps above 0.",
       [](const Strategy& s) -> std::string {
         if (!needs_total_steps(s.lr_schedule.type) || s.lr_schedule.total_steps > 0) return "";
         return fmt::format("{} needs \"total_steps\" above 0. [T0531] hint: give it how many steps the whole run has",
                            name_of(s.lr_schedule.type));
       }},
      {{"/lr_schedule/type", "/lr_schedule/decay_steps"},
       "lr_schedule.type wsd needs decay_steps above 0.",
       [](const Strategy& s) -> std::string {
         if (s.lr_schedule.type != LrScheduleType::kWsd || s.lr_schedule.decay_steps > 0) return "";
         return "wsd needs \"decay_steps\" above 0: the length of its final decay. [T0532] hint: give it, such as a "
                "tenth of total_steps";
       }},
      {{"/lr_schedule/warmup_steps", "/lr_schedule/decay_steps", "/lr_schedule/total_steps", "/lr_schedule/type"},
       "lr_schedule.warmup_steps + decay_steps are at most total_steps.",
       [](const Strategy& s) -> std::string {
         const LrScheduleConfig& schedule = s.lr_schedule;
         if (!needs_total_steps(schedule.type) || schedule.total_steps == 0) return "";
         if (schedule.warmup_steps + schedule.decay_steps <= schedule.total_steps) return "";
         return fmt::format(
             "warmup_steps {} + decay_steps {} are more than total_steps {}. [T0533] hint: raise total_steps, or "
             "lower one of the others",
             schedule.warmup_steps, schedule.decay_steps, schedule.total_steps);
       }},
      {{"/lr_schedule/warmup_samples", "/lr_schedule/warmup_epochs", "/lr_schedule/warmup_steps"},
       "Of lr_schedule.warmup_steps, warmup_samples and warmup_epochs one is given.",
       [](const Strategy& s) -> std::string {
         const LrScheduleConfig& schedule = s.lr_schedule;
         const int given = (schedule.warmup_steps > 0 ? 1 : 0) + (schedule.warmup_samples > 0 ? 1 : 0) +
                           (schedule.warmup_epochs > 0 ? 1 : 0);
         if (given <= 1) return "";
         return "the rise is given in more than one of warmup_steps, warmup_samples and warmup_epochs. [T0923] "
                "hint: give one of them";
       }},
      {{"/offload/paths", "/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier",
        "/offload/gradients/tier", "/offload/activations/tier"},
       "offload.paths names at least one directory where a tier is nvme, and where it is auto and the CPU trains.",
       [](const Strategy& s) -> std::string {
         const OffloadConfig& o = s.offload;
         const Tier tiers[] = {o.parameters.tier, o.masters.tier, o.moments.tier, o.gradients, o.activations};
         const bool needs_files = std::find(std::begin(tiers), std::end(tiers), Tier::kNvme) != std::end(tiers);
         if (!needs_files || !o.paths.empty()) return "";
         return "the tier nvme needs \"paths\". [T0534] hint: name one directory on each local disk, such as "
                "[\"/mnt/nvme0\"]";
       }},
      {{"/memory/limit", "/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier"},
       "An offload tier auto needs memory.limit.",
       [](const Strategy& s) -> std::string {
         const OffloadConfig& offload = s.offload;
         const bool chooses = offload.parameters.tier == Tier::kAuto || offload.masters.tier == Tier::kAuto ||
                              offload.moments.tier == Tier::kAuto;
         if (!chooses || s.memory.limit_bytes > 0) return "";
         return "the tier auto needs a \"limit\" of memory to fit into. [T0535] hint: give \"memory\": {\"limit\": "
                "\"8GiB\"}, say";
       }},
      // A record holds the masters and the states of one run of elements, so it lies on one tier.
      {{"/offload/masters/tier", "/offload/moments/tier"},
       "offload.masters and offload.moments are not one on host and the other on nvme or auto.",
       [](const Strategy& s) -> std::string {
         const Tier masters = s.offload.masters.tier, moments = s.offload.moments.tier;
         const bool is_one = masters == moments || masters == Tier::kMemory || moments == Tier::kMemory;
         if (is_one || (masters != Tier::kHost && moments != Tier::kHost)) return "";
         return "masters and moments move in one record, so both lie on the tier host or neither. [T0536] hint: "
                "give both the same tier, or leave one in \"memory\"";
       }}};
  std::ranges::move(compression_rules(), std::back_inserter(rules));
  std::vector<StrategyRule> more = {
      {{"/optimizer/groups", "/optimizer/type"},
       "Groups of optimizer.groups have different names, at least one pattern, and eps, betas, type and "
       "layer_adaptation only where optimizer.type has them.",
       [](const Strategy& s) -> std::string {
         std::set<std::string> names;
         for (std::size_t i = 0; i < s.optimizer.groups.size(); ++i) {
           const ParameterGroup& group = s.optimizer.groups[i];
           if (const std::string problem = problem_of_group(group, s); !problem.empty()) {
             return fmt::format("group {} {}", i, problem);
           }
           if (!group.name.empty() && !names.insert(group.name).second) {
             return fmt::format("two groups are named \"{}\". [T0554] hint: give each group a name of its own",
                                group.name);
           }
         }
         return "";
       }},
      {{"/offload/parameters/tier", "/strategy", "/placement/parameters"},
       "Parameters below memory go with FULL_SHARD and HYBRID_SHARD: other strategies keep them gathered.",
       [](const Strategy& s) -> std::string {
         if (s.offload.parameters.tier == Tier::kMemory || releases_parameters(s)) return "";
         return "this strategy keeps all parameters gathered, so they need their memory anyway. [T0537] hint: take "
                "\"FULL_SHARD\" (or by \"placement\" cut parameters over \"rank\"), which gathers units when they are "
                "used, on one rank too";
       }},
      {{"/offload/parameters/tier", "/optimizer/shard_over", "/placement/optimizer"},
       "Parameters below memory go without optimizer.shard_over \"world\", and without placement.optimizer over host.",
       [](const Strategy& s) -> std::string {
         const bool over_hosts = s.optimizer.shard_over_world || placement_axes(s).optimizer.host;
         if (s.offload.parameters.tier == Tier::kMemory || !over_hosts) return "";
         return "updated parameters cannot be gathered over replicas below memory yet. [T0538] hint: leave "
                "shard_over \"shard\" (with \"placement\", leave \"host\" out of gradients and optimizer), or "
                "parameters in \"memory\"";
       }},
      {{"/offload/gradients/tier", "/optimizer/type"},
       "Gradients below memory go with optimizers that update element by element.",
       [](const Strategy& s) -> std::string {
         const OptimizerType type = s.optimizer.type;
         const bool is_elementwise = !updates_whole_tensors(type) && !adapts_layers(type);
         if (s.offload.gradients == Tier::kMemory || is_elementwise) return "";
         return fmt::format(
             "{} goes through gradients more than once a step. [T0556] hint: leave gradients of \"offload\" out, or "
             "take adamw",
             name_of(type));
       }},
      {{"/offload/gradients/tier", "/gradient_sync", "/gradient_accumulation", "/deal/microbatches"},
       "Gradients below memory go without gradient_sync last_microbatch.",
       [](const Strategy& s) -> std::string {
         const bool accumulates = has_microbatches(s) && s.gradient_sync == GradientSync::kLastMicrobatch;
         if (s.offload.gradients == Tier::kMemory || !accumulates) return "";
         return "last_microbatch keeps whole gradients in memory until they are reduced, more than their sums need. "
                "[T0557] hint: take each_microbatch";
       }},
      {{"/gradient_clip_value", "/optimizer/type"},
       "gradient_clip_value goes without optimizer.type " + types_with(optimizer_traits::kGradientNorms) + ".",
       [](const Strategy& s) -> std::string {
         const OptimizerType type = s.optimizer.type;
         if (s.gradient_clip_value == 0 || !has(type, optimizer_traits::kGradientNorms)) return "";
         return fmt::format(
             "{} divides by the gradient's norm, which is not known after clipping by value. [T0555] hint: take "
             "gradient_clipping",
             name_of(type));
       }},
      in_backward_rule(
          "/offload/gradients/tier", "offload.gradients below memory",
          [](const Strategy& s) { return s.offload.gradients != Tier::kMemory; },
          "gradients that are used when they are summed need no place"),
      in_backward_rule(
          "/offload/step", "offload.step cpu", [](const Strategy& s) { return s.offload.step == OffloadedStep::kCpu; },
          "the CPU would stand still for each unit, and the GPU with it"),
      {{"/on_spike/action", "/checkpoint/dir"},
       "on_spike.action rollback needs checkpoint.dir.",
       [](const Strategy& s) -> std::string {
         if (s.on_spike.action != SpikeAction::kRollback || !s.checkpoint.dir.empty()) return "";
         return "rollback needs a folder to go back to. [T0558] hint: \"checkpoint\": {\"dir\": ...}, the folder "
                "with the checkpoints to go back to, in this file: a flag does not count; or take \"skip\"";
       }},
      {{"/on_spike/action", "/durable/every"},
       "on_spike.action rollback goes without durable.",
       [](const Strategy& s) -> std::string {
         if (s.on_spike.action != SpikeAction::kRollback || s.durable.every == 0) return "";
         return "rollback cannot stand beside \"durable\": a run that goes on from a commit knows no checkpoint to go "
                "back to. [T0559] hint: take \"skip\"";
       }},
      {{"/durable/every", "/durable/dir"},
       "durable.every needs durable.dir.",
       [](const Strategy& s) -> std::string {
         if (s.durable.every == 0 || !s.durable.dir.empty()) return "";
         return "needs a folder. [T0560] hint: \"durable\": {\"dir\": ...}, on a local disk of each host";
       }},
      in_backward_rule(
          "/on_spike/action", "on_spike", [](const Strategy& s) { return s.on_spike.action != SpikeAction::kNone; },
          "the loss of all ranks is known only when backward has ended"),
      in_backward_rule(
          "/gradient_clipping", "gradient_clipping", [](const Strategy& s) { return s.gradient_clipping > 0; },
          "the norm of all gradients is known only when backward has ended"),
      in_backward_accumulation_rule(),
      in_backward_rule(
          "/mixed_precision/param", "param fp16",
          [](const Strategy& s) { return s.mixed_precision.param == DType::kF16; },
          "loss scaling skips steps that overflow, and an update in backward cannot be taken back"),
      in_backward_rule(
          "/compression/restore_skipped", "compression.restore_skipped",
          [](const Strategy& s) { return s.compression.restore_skipped; },
          "a step whose updates are under way is not skipped")};
  std::ranges::move(more, std::back_inserter(rules));
  std::ranges::move(placement_rules(), std::back_inserter(rules));
  std::ranges::move(sync_rules(), std::back_inserter(rules));
  std::ranges::move(asynchronous_rules(), std::back_inserter(rules));
  std::ranges::move(reproducible_rules(), std::back_inserter(rules));
  std::ranges::move(noise_rules(), std::back_inserter(rules));
  std::ranges::move(deal_rules(), std::back_inserter(rules));
  return rules;
}

}  // namespace

const std::vector<StrategyRule>& strategy_rules() {
  static const std::vector<StrategyRule> rules = make_rules();
  return rules;
}

}  // namespace tessera
