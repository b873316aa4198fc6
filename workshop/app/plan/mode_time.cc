#include "workshop/app/plan/mode_time.h"

#include <algorithm>

#include "runtime/border/throw.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

struct ModePart {
  const char* key;
  const char* what;
  double seconds;
};

std::vector<ModePart> parts_of(const ModeCost& cost) {
  return {{"compute_s", "compute", cost.compute_s()},
          {"pull_s", "pull", cost.costs.pull_s},
          {"push_s", "push", cost.costs.push_s},
          {"meet_s", "meeting", cost.costs.meet_s}};
}

}  // namespace

ModeCost mode_cost_of(const PlannedWorld& world, const TimingFiles& files) {
  const SyncConfig& sync = world.plan.update().outer;
  if (!sync.has_common_parameters()) {
    const int ranks_per_host = world.topology.local_world_size;
    return cost_of_outer_steps(predicted_step(world.plan, files, ranks_per_host), world.plan, files.profile,
                               files.links_of(world.plan.placement(), ranks_per_host));
  }
  expect_servers(files, sync);
  const Links links = sync.has_servers() ? files.links : files.links_inside.value_or(files.links);
  return value_or_throw(mode_cost(world.plan, files.profile, links, std::max(files.servers, 1)));
}

int ranks_of_mode(const MemoryPlan& plan) {
  return plan.update().outer.makes_outer_steps() ? plan.placement().replicas : plan.placement().mesh.world_size();
}

AlikeSteps steps_of_alike(const ModeCost& cost, int ranks) {
  if (cost.rule.kind == ModeRule::Kind::kMeeting) {  // the mean from one meeting to the next
    const auto every = static_cast<double>(cost.rule.every);
    return {cost.compute_s() + ((every - 1) * cost.costs.push_s + cost.costs.meet_s) / every, 0.0};
  }
  const WorldOptions options{.steps = 10};
  const ModeWorld world = value_or_throw(simulate_mode(cost, ranks, options));
  return {world.seconds / static_cast<double>(options.steps), world.staleness_mean};
}

std::string to_text(const ModeCost& cost, const AlikeSteps& alike) {
  std::string text = "a rank's step:";
  const char* between = " ";
  for (const ModePart& part : parts_of(cost)) {
    if (part.seconds <= 0) continue;
    text += std::string(between) + part.what + " " + number_text(part.seconds, "%.4f") + " s";
    between = ", ";
  }
  text += "\nranks that are alike: " + number_text(alike.seconds, "%.4f") + " s a step";
  if (cost.rule.kind == ModeRule::Kind::kAsynchronous)
    text += ", staleness " + number_text(alike.staleness_mean, "%.2f") + " on average";
  text += "\n";
  for (const std::string& left_out : cost.left_out) text += "not counted: " + left_out + "\n";
  return text;
}

nlohmann::ordered_json to_json(const ModeCost& cost, const AlikeSteps& alike) {
  nlohmann::ordered_json json = {{"seconds", alike.seconds}};
  for (const ModePart& part : parts_of(cost)) json[part.key] = part.seconds;
  json["staleness_mean"] = alike.staleness_mean;
  json["not_counted"] = cost.left_out;
  return json;
}

}  // namespace tessera::app
