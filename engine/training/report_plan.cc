#include <cstdlib>
#include <sstream>
#include <string>
#include <utility>
#include <variant>

#include "engine/parameters/parameter_groups.h"
#include "engine/training/training.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

/// Returns the words for the line about gradients on the wire.
std::string words_of_compression(const PlannedWire& wire, int ranks) {
  const CompressionConfig& compression = wire.compression;
  const bool shard = wire.compressed_shard_part > 0, replicate = wire.compressed_replicate_part > 0;
  if (std::holds_alternative<CommHookConfig>(compression.method))
    return ranks > 1 ? " (summed by the program's CommHook)" : "";
  if (!shard && !replicate) return "";
  if (compression.has_method()) return " (over the network by " + describe(compression.method) + ")";
  const char* const axes = !replicate ? "the shard axis" : !shard ? "the replicate axis" : "both axes";
  return c10::str(" (over the network on ", axes, ": ", name_of(compression.gradients), ", sums ",
                  name_of(compression.sums), compression.error_feedback ? ", with error feedback)" : ")");
}

/// Returns the words for the line about parameters' types.
std::string words_of_gathers(const PlannedWire& wire) {
  const WireForm form = wire.gathers != WireForm::kPlain ? wire.gathers : wire.replica_gathers;
  return form == WireForm::kPlain ? "" : " (over the network " + name_of(form) + ")";
}

/// Returns a hint if units are updated in backward and some unit has more records than are read ahead. The hint is
/// empty otherwise.
std::string hint_of_queue_depth(const MemoryPlan& plan) {
  const bool gives_way = plan.placement().is_queued && plan.parameters_below();  // the rule of RecordPlan::queue_depth
  if (!plan.update().in_backward || gives_way) return "";
  const std::int64_t depth = plan.records().queue_depth;
  const std::int64_t records = plan.most_records_of_a_unit(), wanted = std::min(records, kMostQueueDepth);
  if (wanted <= depth) return "";
  PlanInput input = plan.input();
  input.tiers.queue_depth = wanted;
  const MemoryPlan deeper(std::move(input));
  return c10::str("\"offload.queue_depth\" is ", depth, ", and the update of a unit moves up to ", records,
                  " records: backward waits for those beyond it. [T0149] hint: raise it; ", wanted, " takes ",
                  format_bytes(deeper.use().total() - plan.use().total()), " more");
}

/// Returns a text about the defaults that differ in other versions. It is empty if the strategy names all these
/// numbers.
std::string words_of_changed_defaults(const OptimizerConfig& optimizer) {
  std::string text;
  for (const ChangedDefault& each : changed_defaults(optimizer))
    text += (text.empty() ? "" : "; ") + each.key + " is " + each.now + ", and was " + each.before;
  if (text.empty()) return "";
  return "the strategy leaves out what has another default for " + name_of(optimizer.type) +
         " since Tessera 0.2 (docs/strategy.md says whose): " + text +
         ". [T0150] hint: write the keys into the strategy";
}

/// Returns whether a step gathers some unit more than once.
bool gathers_again(const MemoryPlan& plan) {
  for (std::size_t i = 0; i < plan.units().size(); ++i) {
    if (plan.gathers_in_step(i) > 1) return true;
  }
  return false;
}

/// Returns whether the whole plan is to be printed. It is printed only on request, since the output belongs to the
/// program.
bool wants_table_of_plan() {
  const char* const wish = std::getenv("TESSERA_PLAN");
  const std::string said = wish == nullptr ? "" : wish;
  if (!said.empty() && said != "table" && said != "line")
    log_warning("TESSERA_PLAN: " + quoted_text(said) + " is neither \"line\", the default, nor \"table\"" +
                did_you_mean(said, {"line", "table"}));
  return said == "table";
}

/// Returns a text if parameters of the module train in fp16 and the loss is not scaled; else an empty text.
std::string words_of_unscaled_loss(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy) {
  if (strategy.mixed_precision.param == DType::kF16) return "";
  std::string name;
  for_each_trainable(units, [&](const FlatGroup& group) {
    if (group.dtype == DType::kF16 && name.empty()) name = group.parameters[0].name;
  });
  if (name.empty()) return "";
  return "parameter " + name +
         " is fp16 in the module, and stays so, but the loss is not scaled, so small gradients vanish. [T1085] hint: "
         "set \"mixed_precision\": {\"param\": \"fp16\"}, which scales the loss; or leave the module in fp32 and set "
         "\"bf16\"";
}

}  // namespace

void Training::report_plan(bool continues) const {
  const Strategy& strategy = job.strategy;
  const MeshPosition& mesh = plan.placement().mesh;
  const std::string compression = words_of_compression(plan.wire(), mesh.world_size());
  std::ostringstream text;
  text << "plan of " << name_of_placement(strategy)
       << (strategy.placement.is_given() ? ": " + describe_placement(strategy) : "") << ", mesh " << mesh.replicate_size
       << " x " << mesh.shard_size << ", " << units.size() << " units, parameters "
       << name_of(strategy.mixed_precision.param) << words_of_gathers(plan.wire()) << ", gradients on the wire "
       << name_of(strategy.mixed_precision.reduce) << compression << ", optimizer state "
       << name_of(strategy.optimizer.state_dtype)
       << (plan.placement().shared ? ", one copy of the parameters for the ranks of a host" : "");
  if (plan.served_bytes().shards > 0)
    text << ", parameter servers with " << format_bytes(plan.served_bytes().shards) << " in all beside these";
  if (wants_table_of_plan()) {
    text << "\n" << plan.to_table();
    if (const std::string groups = table_of_groups(units, strategy.optimizer); !groups.empty()) text << "\n" << groups;
  } else {
    text << ": " << format_bytes(plan.use().total()) << " a rank beside activations (TESSERA_PLAN=table shows of what)";
  }
  log_info(text.str());
  const SyncConfig& outer = plan.update().outer;
  if (outer.makes_outer_steps() && plan.placement().replicas == 1) {
    log_warning(
        "\"sync\" has one replica, with which no other meets. [T0153] hint: \"mesh\": {\"replicate\": ...} says how "
        "many there are");
  }
  if (strategy.offload.gradients != plan.tiers().gradients) {
    log_warning(
        "\"offload.gradients\" has no effect here: no unit but the root trains, whose sums stay in memory. [T0154] "
        "hint: name classes in \"units\"");
  }
  const bool compresses_outer =
      outer.makes_outer_steps() && (job.axes.replicate->compressed_part() > 0 || plan.outer_sums_on_host().slots > 0);
  if (compresses(strategy.compression) && !compresses_outer &&
      !std::holds_alternative<CommHookConfig>(strategy.compression.method) && compression.empty()) {
    log_info(
        "\"compression\" has no effect here: on the axes that it names no gradients go over a network, as the ranks "
        "share memory");
  }
  if (strategy.compression.gathers != WireForm::kPlain && words_of_gathers(plan.wire()).empty())
    log_info("\"compression.gathers\" has no effect here: it changes nothing that goes over a network");
  if (strategy.reductions_ahead.value_or(0) > 0 && plan.sums().block_sums > 0)
    log_info("\"reductions_ahead\" has no effect here: ranks send the sums of subtrees of one unit after the other");
  if (plan.placement().secondary.ranks > 0 && !gathers_again(plan))
    log_info("\"secondary\" saves nothing here: there is a slot for each unit, so a step gathers each only once");
  if (const std::string hint = hint_of_queue_depth(plan); !hint.empty()) log_info(hint);
  if (const std::string text = words_of_changed_defaults(strategy.optimizer); !continues && !text.empty())
    log_warning(text);
  if (const std::string text = words_of_unscaled_loss(units, strategy); !continues && !text.empty()) log_warning(text);
  if (units.size() == 1 && plan.use()[MemoryCategory::kSlots] > 0) {
    log_warning("the whole module is one unit, so it is gathered at once. [T0155] hint: name classes in \"units\"");
  }
}

}  // namespace tessera
