#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "planner/simulated_world.h"
#include "runtime/border/throw.h"
#include "runtime/config/placement_rows.h"
#include "tessera/run.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/app/plan/mode_time.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/app/plan/scaled_worlds.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

// `tessera simulate`: steps of ranks that are not alike.
//
// `run_simulate` plans the model. Ranks that wait for each other in each step are simulated unit by unit
// (planner/simulated_world.h); those with clocks of their own, and replicas that meet every now and then, by the times
// of whole steps (planner/mode_world.h), and then synchronous ranks of the same speeds are shown beside them.

/// Reads two numbers with "=" between them, such as "7=1.5"; nothing if the text is anything else.
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
                "simulate: --straggler \"" + text + "\" is no rank and factor. [T0040] hint: write them such as 7=1.5");
  return {static_cast<int>(read->first), read->second};
}

/// Reads "0.02=1": share of steps, and seconds.
std::pair<double, double> stall_of(const std::string& text) {
  const auto read = pair_of<double>(text, "%lf=%lf%n");
  if (!read)
    throw Error(ExitCode::kUsage, "simulate: --stall \"" + text +
                                      "\" is no share of steps and seconds. [T1060] hint: write them such as 0.02=1, "
                                      "for 1 s in 2 % of the steps");
  return *read;
}

WorldOptions options_of(const SimulateCommand& command) {
  WorldOptions options;
  options.jitter = command.jitter;
  options.seed = command.seed;
  options.steps = command.steps;
  for (const std::string& straggler : command.stragglers)
    if (!options.stragglers.insert(straggler_of(straggler)).second)
      throw Error(ExitCode::kUsage,
                  "simulate: --straggler \"" + straggler + "\" names a rank for the second time. hint: name it once");
  if (!command.stall.empty()) std::tie(options.stall_share, options.stall_s) = stall_of(command.stall);
  if (!command.trace.empty()) {
    for (int rank = 0; rank < command.world.world_size && rank < command.traced_ranks; ++rank)
      options.traced.push_back(rank);
  }
  return options;
}

/// Returns how replicas differ whose ranks differ as `of_ranks` says: a replica is as slow as its slowest rank, and
/// stands still when one of its ranks does. The run goes on to the next meeting of the replicas, since the mean of its
/// steps would miss a part of a meeting otherwise.
WorldOptions of_replicas(const WorldOptions& of_ranks, const MemoryPlan& plan) {
  const PlannedPlacement& placement = plan.placement();
  const std::int64_t every = plan.update().outer.every;
  const int ranks = placement.mesh.world_size();  // those of a replica are neighbours
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

/// Returns the seconds of a step of synchronous ranks that differ in the same way.
double synchronous_seconds(const PlannedWorld& world, const TimingFiles& files, WorldOptions options) {
  Strategy strategy = world.strategy;
  strategy.sync = {};
  options.traced.clear();
  const MemoryPlan plan = ModelShapes(world.config).plan(strategy, world.topology);
  const MeshLinks links = files.links_of(plan.placement(), world.topology.local_world_size);
  return value_or_throw(simulate_world(plan, files.profile, links, options)).mean_s;
}

/// Simulates ranks with clocks of their own, prints what comes out, and returns the trace.
std::string print_mode(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& of_ranks) {
  const SyncConfig& sync = world.strategy.sync;
  throw_if_error(check_world(of_ranks, world.topology.world_size));
  const WorldOptions options = sync.makes_outer_steps() ? of_replicas(of_ranks, world.plan) : of_ranks;
  const int ranks = ranks_of_mode(world.plan);
  const ModeCost cost = mode_cost_of(world, files);
  const ModeWorld found = value_or_throw(simulate_mode(cost, ranks, options));
  const double seconds = found.seconds / static_cast<double>(options.steps);
  const double synchronous = synchronous_seconds(world, files, of_ranks);
  std::printf("%s, %d %s, %lld steps of a gradient each: %s s a step\n", name_of(sync.type).c_str(), ranks,
              sync.makes_outer_steps() ? "replicas" : "ranks", static_cast<long long>(options.steps),
              number_text(seconds, "%.4f").c_str());
  std::printf("synchronous ranks that differ in the same way: %s s a step, %s times as long\n",
              number_text(synchronous, "%.4f").c_str(), number_text(synchronous / seconds, "%.2f").c_str());
  std::printf("%s", to_text(cost, steps_of_alike(cost, ranks)).c_str());
  const auto [fewest, most] = std::ranges::minmax(found.steps);
  std::printf("gradients of a rank that count: %lld to %lld\n", static_cast<long long>(fewest),
              static_cast<long long>(most));
  if (cost.rule.kind == ModeRule::Kind::kAsynchronous)
    std::printf("staleness of these ranks: mean %s, largest %lld\n", number_text(found.staleness_mean, "%.2f").c_str(),
                static_cast<long long>(found.staleness_max));
  if (cost.rule.kind == ModeRule::Kind::kBackups)
    std::printf("gradients that came too late: %lld\n", static_cast<long long>(found.dropped));
  if (found.waits_for_servers) std::printf("the parameter servers bound it: --servers says how many there are\n");
  return found.trace;
}

/// Simulates ranks that wait for each other in each step, prints what comes out, and returns the trace.
std::string print_synchronous(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options) {
  const MeshLinks links = files.links_of(world.plan.placement(), world.topology.local_world_size);
  const PredictedStep alike = predicted_step(world.plan, files, world.topology.local_world_size);
  const SimulatedWorld simulated = value_or_throw(simulate_world(world.plan, files.profile, links, options));
  std::printf("%s, %d ranks, %lld steps: %s s a step (a tenth below %s, a tenth above %s)\n",
              name_of_placement(world.strategy).c_str(), world.topology.world_size,
              static_cast<long long>(options.steps), number_text(simulated.mean_s, "%.4f").c_str(),
              number_text(simulated.p10_s, "%.4f").c_str(), number_text(simulated.p90_s, "%.4f").c_str());
  if (!simulated.dealt.empty()) {
    const auto [fewest, most] = std::ranges::minmax(simulated.dealt);
    std::printf("dealt by speed: a rank computes %lld to %lld microbatches of a step\n", static_cast<long long>(fewest),
                static_cast<long long>(most));
  }
  std::printf("ranks that are alike: %s s, bound by %s; a rank alone works for %s s\n",
              number_text(alike.seconds, "%.4f").c_str(), name_of(alike.bound).c_str(),
              number_text(alike.work_s(), "%.4f").c_str());
  for (const std::string& left_out : alike.left_out) std::printf("not counted: %s\n", left_out.c_str());
  const std::vector<ScaledWorld> scaled =
      scaled_worlds(ModelShapes(world.config), world.strategy, world.topology, files);
  std::printf("\n%s", to_text(scaled).c_str());
  if (!scaled.empty() && scaled.front().alone_s)
    std::printf("with these ranks, which are not alike: %s %% beside one rank\n",
                number_text(100 * *scaled.front().alone_s / simulated.mean_s, "%.1f").c_str());
  return simulated.trace;
}

}  // namespace

int run_simulate(const SimulateCommand& command) {
  return run([&] {
    const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
    throw_if_error(check_outputs({{"--trace", command.trace, {}}},
                                 {{"--links", command.timing.links, {}}, {"--profile", command.timing.profile, {}}},
                                 existing));
    const WorldOptions options = options_of(command);
    const PlannedWorld world = plan_of_world(command.world);
    if (world.strategy.sync.type == SyncType::kStreamingDiloco)
      throw Error(ExitCode::kConfig,
                  "/sync/type: replicas of streaming_diloco meet while they compute, which is not simulated. [T0041] "
                  "hint: tessera plan --links predicts the mean of their steps; or take \"diloco\"");
    const TimingFiles files = read_timing(command.timing);
    const bool is_synchronous = world.strategy.sync.type == SyncType::kEachStep;
    const std::string trace =
        is_synchronous ? print_synchronous(world, files, options) : print_mode(world, files, options);
    if (command.trace.empty()) return;
    throw_if_error(write_output(command.trace, "{\"traceEvents\":[" + trace + "]}\n", existing, "simulate"));
  });
}

}  // namespace tessera::app
