#include "workshop/app/plan/scaled_worlds.h"

#include <algorithm>
#include <set>

#include "runtime/base/text_table.h"
#include "tessera/error.h"
#include "tessera/scaling.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

std::set<int> sizes_for(const Topology& asked) {
  std::set<int> sizes = {asked.world_size};
  for (int ranks = 1; ranks < asked.local_world_size; ranks *= 2) sizes.insert(ranks);
  for (int ranks = asked.local_world_size; ranks <= ScaledWorld::kMostRanks; ranks *= 2) sizes.insert(ranks);
  return sizes;
}

/// Returns `asked` with another number of ranks. If these ranks need more than one host, each host has as many ranks as
/// in `asked`.
Topology with_ranks(const Topology& asked, int ranks) {
  Topology topology = asked;
  topology.world_size = ranks;
  topology.local_world_size = std::min(ranks, asked.local_world_size);
  return topology;
}

/// Returns the plan, or nothing if the strategy does not allow the topology.
std::optional<MemoryPlan> plan_of(const ModelShapes& model, Strategy strategy, const Topology& topology) {
  if (topology.world_size == 1) strategy.secondary = {};  // one rank gathers nothing; other worlds are compared with it
  try {
    return model.plan(strategy, topology);
  } catch (const Error& error) {
    if (error.exit_code() != ExitCode::kConfig) throw;
    return std::nullopt;
  }
}

}  // namespace

double ScaledWorld::scaled_speedup() const { return tessera::scaled_speedup(step.communication_share(), ranks); }
double ScaledWorld::scaling_efficiency() const {
  return tessera::scaling_efficiency(step.communication_share(), ranks);
}

std::optional<double> ScaledWorld::efficiency_beside_one() const {
  if (!alone_s || step.seconds <= 0) return std::nullopt;
  return *alone_s / step.seconds;
}

std::vector<ScaledWorld> scaled_worlds(const ModelShapes& model, const Strategy& strategy, const Topology& asked,
                                       const TimingFiles& files) {
  std::vector<ScaledWorld> worlds;
  std::optional<double> alone_s;
  for (const int ranks : sizes_for(asked)) {
    const Topology topology = with_ranks(asked, ranks);
    const std::optional<MemoryPlan> plan = plan_of(model, strategy, topology);
    if (!plan) continue;
    ScaledWorld& world = worlds.emplace_back(ScaledWorld{ranks, topology.num_hosts()});
    world.step = predicted_step(*plan, files, topology.local_world_size);
    if (ranks == 1) alone_s = world.step.seconds;
    world.alone_s = alone_s;
  }
  return worlds;
}

std::string to_text(std::span<const ScaledWorld> worlds) {
  TextTable table({right_column("ranks"), right_column("hosts"), right_column("s a step"),
                   right_column("communication"), right_column("scaled speed-up"), right_column("efficiency"),
                   right_column("beside one rank")});
  const auto percent = [](double share) { return number_text(100 * share, "%.1f %%"); };
  for (const ScaledWorld& world : worlds) {
    const std::optional<double> beside_one = world.efficiency_beside_one();
    table.add_row({std::to_string(world.ranks), std::to_string(world.hosts), number_text(world.step.seconds, "%.4f"),
                   percent(world.step.communication_share()), number_text(world.scaled_speedup(), "%.2f"),
                   percent(world.scaling_efficiency()), beside_one ? percent(*beside_one) : ""});
  }
  return "more ranks, each with the work that one has now\n" + table.to_string();
}

nlohmann::ordered_json to_json(std::span<const ScaledWorld> worlds) {
  nlohmann::ordered_json json = nlohmann::ordered_json::array();
  for (const ScaledWorld& world : worlds) {
    nlohmann::ordered_json& each =
        json.emplace_back(nlohmann::ordered_json{{"ranks", world.ranks},
                                                 {"hosts", world.hosts},
                                                 {"seconds", world.step.seconds},
                                                 {"communication_share", world.step.communication_share()},
                                                 {"scaled_speedup", world.scaled_speedup()},
                                                 {"scaling_efficiency", world.scaling_efficiency()}});
    const std::optional<double> beside_one = world.efficiency_beside_one();
    each["efficiency_beside_one_rank"] = beside_one ? nlohmann::ordered_json(*beside_one) : nlohmann::ordered_json();
  }
  return json;
}

}  // namespace tessera::app
