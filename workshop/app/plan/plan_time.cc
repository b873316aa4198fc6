#include "workshop/app/plan/plan_time.h"

#include <algorithm>

#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "runtime/border/throw.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

struct Part {
  const char* key;
  const char* what;
  double seconds;
};

std::vector<Part> parts_of(const PredictedStep& step) {
  return {{"compute_s", "forward and backward", step.compute_s},
          {"update_s", "update", step.update_s},
          {"rest_s", "the rest of a step on a rank alone", step.rest_s},
          {"stretch_s", "cores that transport takes from these", step.stretch_s},
          {"exposed_gather_s", "waiting for parameters", step.exposed_gather_s},
          {"exposed_reduction_s", "waiting for sums of gradients", step.exposed_reduction_s},
          {"exposed_publish_s", "waiting for updated values", step.exposed_publish_s},
          {"agreement_s", "the step's agreement", step.agreement_s},
          {"exposed_outer_s", "waiting for other replicas, of a step", step.exposed_outer_s}};
}

nlohmann::ordered_json json_of(const PredictedWire& wire) {
  return {{"busy_s", wire.busy_s}, {"calls", wire.calls}, {"sent_bytes", wire.sent_bytes}};
}

std::string text_of(const char* axis, const PredictedWire& wire) {
  if (wire.calls == 0) return "";
  return std::string("the wire of the ") + axis + " axis is busy for " + number_text(wire.busy_s, "%.4f") + " s with " +
         std::to_string(wire.calls) + " calls; a rank sends " + format_bytes(wire.sent_bytes) + "\n";
}

int hosts_of(int ranks, int of_host) { return (ranks + of_host - 1) / of_host; }

}  // namespace

TimingFiles read_timing(const TimingOptions& options) {
  TimingFiles files;
  files.profile = value_or_throw(read_step_profile(options.profile));
  files.links = value_or_throw(read_links(options.links));
  if (!options.links_inside.empty()) files.links_inside = value_or_throw(read_links(options.links_inside));
  files.servers = options.servers;
  return files;
}

// Ranks of a shard group are neighbours. Two neighbours in a replicate group are as many ranks apart as a shard group
// has.
MeshLinks TimingFiles::links_of(const PlannedPlacement& placement, int ranks_per_host) const {
  const int shard = placement.mesh.shard_size, world = placement.mesh.world_size() * placement.replicas;
  const int of_shard_on_host = std::min(shard, ranks_per_host);
  MeshLinks of_axes{links, links};
  if (const int copy = placement.secondary.ranks; copy > 0 && ranks_per_host % copy != 0) {  // a copy crosses hosts
    of_axes.secondary = links.of_group(copy, std::max(2, hosts_of(copy, ranks_per_host)), 1);
  } else {
    of_axes.secondary = links_inside.value_or(links);
  }
  if (shard > ranks_per_host) {
    of_axes.shard = links.of_group(shard, hosts_of(shard, ranks_per_host), 1);
  } else if (links_inside) {
    of_axes.shard = *links_inside;
  }
  if (world > ranks_per_host) {
    const int replicas = world / shard, of_replicas_on_host = ranks_per_host / of_shard_on_host;
    of_axes.replicate = links.of_group(replicas, hosts_of(replicas, of_replicas_on_host), of_shard_on_host);
  } else if (links_inside) {
    of_axes.replicate = *links_inside;
  }
  return of_axes;
}

void expect_servers(const TimingFiles& files, const SyncConfig& sync) {
  if (files.servers == 0 || sync.has_servers()) return;
  throw Error(ExitCode::kUsage,
              "--servers says how many parameter servers there are, and this strategy has none. [T1059] hint: give the "
              "strategy \"sync\": {\"type\": \"asynchronous\", \"owners\": \"servers\"}, or leave --servers out");
}

PredictedStep predicted_step(const MemoryPlan& plan, const TimingFiles& files, int ranks_per_host) {
  if (plan.update().outer.has_common_parameters())
    throw Error(ExitCode::kConfig,
                "/sync/type: asynchronous ranks, and those with backups, have no step in common whose time could be "
                "predicted here. [T0830] hint: tessera plan and tessera simulate with --links and this strategy say "
                "how long a rank's own step takes; or leave \"sync\" out of the strategy");
  expect_servers(files, plan.update().outer);
  return value_or_throw(predict_step(plan, files.profile, files.links_of(plan.placement(), ranks_per_host)));
}

std::string to_text(const PredictedStep& step) {
  using Align = TextTable::Align;
  TextTable table({{"a step takes"}, {"seconds", Align::kRight}, {"share", Align::kRight}});
  for (const Part& part : parts_of(step)) {
    if (part.seconds > 0)
      table.add_row(
          {part.what, number_text(part.seconds, "%.4f"), number_text(100 * part.seconds / step.seconds, "%.1f %%")});
  }
  table.add_row({"all together", number_text(step.seconds, "%.4f"), ""});
  std::string text = table.to_string() + text_of("shard", step.shard) + text_of("replicate", step.replicate) +
                     "what bounds it: " + name_of(step.bound) + "\n";
  for (const std::string& left_out : step.left_out) text += "not counted: " + left_out + "\n";
  return text;
}

nlohmann::ordered_json to_json(const PredictedStep& step) {
  nlohmann::ordered_json json = {{"seconds", step.seconds}};
  for (const Part& part : parts_of(step)) json[part.key] = part.seconds;
  json["shard"] = json_of(step.shard);
  json["replicate"] = json_of(step.replicate);
  json["bound"] = name_of(step.bound);
  json["not_counted"] = step.left_out;
  return json;
}

}  // namespace tessera::app
