#include "workshop/app/plan/unlike_ranks.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "runtime/border/throw.h"
#include "workshop/app/plan/mode_time.h"

namespace tessera::app {
namespace {

/// Reads two numbers with "=" between them, such as "7=1.5". Returns nothing if the text has another form.
template <class First>
std::optional<std::pair<First, double>> pair_of(const std::string& text, const char* format) {
  std::pair<First, double> read{};
  int length = 0;
  const bool fits = std::sscanf(text.c_str(), format, &read.first, &read.second, &length) == 2;
  if (!fits || static_cast<std::size_t>(length) != text.size()) return std::nullopt;
  return read;
}

/// Reads a text such as "7=1.5": a rank and a factor.
std::pair<int, double> straggler_of(const std::string& text) {
  const auto read = pair_of<std::int64_t>(text, "%ld=%lf%n");
  if (!read || read->first < 0 || read->first > std::numeric_limits<int>::max())
    throw Error(ExitCode::kUsage,
                "--straggler \"" + text + "\" is no rank and factor. [T0040] hint: write them such as 7=1.5");
  return {static_cast<int>(read->first), read->second};
}

/// Reads a text such as "0.02=1": a share of steps, and a number of seconds.
std::pair<double, double> stall_of(const std::string& text) {
  const auto read = pair_of<double>(text, "%lf=%lf%n");
  if (!read)
    throw Error(ExitCode::kUsage, "--stall \"" + text +
                                      "\" is no share of steps and seconds. [T1060] hint: write them such as 0.02=1, "
                                      "for 1 s in 2 % of the steps");
  return *read;
}

/// Returns how replicas differ if their ranks differ as `of_ranks` says. A replica is as slow as its slowest rank, and
/// stops when one of its ranks stops. Steps are rounded up to a multiple of sync.every.
WorldOptions of_replicas(const WorldOptions& of_ranks, const MemoryPlan& plan) {
  const PlannedPlacement& placement = plan.placement();
  const std::int64_t every = plan.update().outer.every;
  const int ranks = placement.mesh.world_size();  // the ranks of a replica are neighbours
  WorldOptions options = of_ranks;
  options.steps = (of_ranks.steps + every - 1) / every * every;
  options.stragglers.clear();
  for (int replica = 0; replica < placement.replicas; ++replica) {
    double slowest = 0;
    for (int rank = replica * ranks; rank < (replica + 1) * ranks; ++rank) {
      const auto found = of_ranks.stragglers.find(rank);
      slowest = std::max(slowest, found == of_ranks.stragglers.end() ? 1.0 : found->second);
    }
    options.stragglers[replica] = slowest;
  }
  options.stall_share = 1 - std::pow(1 - of_ranks.stall_share, ranks);
  std::erase_if(options.traced, [&](int replica) { return replica >= placement.replicas; });
  return options;
}

}  // namespace

WorldOptions options_of(const UnlikeRanks& ranks) {
  WorldOptions options;
  options.jitter = ranks.jitter;
  for (const std::string& straggler : ranks.stragglers) {
    if (!options.stragglers.insert(straggler_of(straggler)).second)
      throw Error(ExitCode::kUsage,
                  "--straggler \"" + straggler + "\" names a rank for the second time. [T1070] hint: name it once");
  }
  if (!ranks.stall.empty()) std::tie(options.stall_share, options.stall_s) = stall_of(ranks.stall);
  return options;
}

SimulatedWorld simulated(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options) {
  const MeshLinks links = files.links_of(world.plan.placement(), world.topology.local_world_size);
  return value_or_throw(simulate_world(world.plan, files.profile, links, options));
}

SimulatedMode simulated_mode(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& of_ranks) {
  throw_if_error(check_world(of_ranks, world.topology.world_size));
  const bool has_replicas = world.plan.update().outer.makes_outer_steps();
  const WorldOptions options = has_replicas ? of_replicas(of_ranks, world.plan) : of_ranks;
  SimulatedMode mode{mode_cost_of(world, files), ranks_of_mode(world.plan), options.steps, {}};
  mode.run = value_or_throw(simulate_mode(mode.cost, mode.ranks, options));
  return mode;
}

}  // namespace tessera::app
