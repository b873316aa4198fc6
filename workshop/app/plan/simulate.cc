#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "runtime/border/throw.h"
#include "runtime/config/placement_rows.h"
#include "tessera/run.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/app/plan/backup_gain.h"
#include "workshop/app/plan/mode_time.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/app/plan/scaled_worlds.h"
#include "workshop/app/plan/simulated_order.h"
#include "workshop/app/plan/unlike_ranks.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

// `tessera simulate` simulates steps of ranks that are not alike.
//
// `run_simulate` plans the model. Ranks that wait for each other in each step are simulated unit by unit
// (planner/simulated_world.h). Ranks with clocks of their own, and replicas that meet at outer steps, are simulated by
// the times of whole steps (planner/mode_world.h). Synchronous ranks of the same speeds are then shown beside them.

WorldOptions options_of(const SimulateCommand& command) {
  WorldOptions options = options_of(command.ranks);
  options.seed = command.seed;
  options.steps = command.steps;
  if (!command.trace.empty()) {
    for (int rank = 0; rank < command.world.world_size && rank < command.traced_ranks; ++rank)
      options.traced.push_back(rank);
  }
  return options;
}

/// Returns the seconds of a step of synchronous ranks that differ in the same way.
double synchronous_seconds(PlannedWorld world, const TimingFiles& files, WorldOptions options) {
  world.strategy.sync = {};
  options.traced.clear();
  world.plan = ModelShapes(world.config).plan(world.strategy, world.topology);
  return simulated(world, files, options).mean_s;
}

/// Writes the order of a simulated run, and prints how the order is played.
void write_order(const SimulatedOrder& order, const SimulatedMode& mode, const std::string& path, Existing existing) {
  throw_if_error(order.write_file(mode.run.timeline, path, existing));
  const auto [fewest, most] = std::ranges::minmax(mode.run.steps);
  std::printf(
      "order: %s has the pulls and pushes of %zu shards. \"sync\": {\"play_order\": ...} plays them, and each "
      "rank of tessera train --steps %lld makes its %lld to %lld steps\n",
      path.c_str(), order.shards().size(), static_cast<long long>(most), static_cast<long long>(fewest),
      static_cast<long long>(most));
}

/// Prints the results of ranks with clocks of their own.
void print_mode(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options,
                const SimulatedMode& mode) {
  const SyncConfig& sync = world.strategy.sync;
  const ModeCost& cost = mode.cost;
  const ModeWorld& found = mode.run;
  const double seconds = mode.seconds();
  const double synchronous = synchronous_seconds(world, files, options);
  std::printf("%s, %d %s, %lld steps of a gradient each: %s s a step\n", name_of(sync.type).c_str(), mode.ranks,
              sync.makes_outer_steps() ? "replicas" : "ranks", static_cast<long long>(mode.steps),
              number_text(seconds, "%.4f").c_str());
  std::printf("synchronous ranks that differ in the same way: %s s a step, %s times as long\n",
              number_text(synchronous, "%.4f").c_str(), number_text(synchronous / seconds, "%.2f").c_str());
  std::printf("%s", to_text(cost, steps_of_alike(cost, mode.ranks)).c_str());
  const auto [fewest, most] = std::ranges::minmax(found.steps);
  std::printf("gradients of a rank that count: %lld to %lld\n", static_cast<long long>(fewest),
              static_cast<long long>(most));
  if (cost.rule.kind == ModeRule::Kind::kAsynchronous)
    std::printf("staleness of these ranks: mean %s, largest %lld\n", number_text(found.staleness_mean, "%.2f").c_str(),
                static_cast<long long>(found.staleness_max));
  if (cost.rule.kind == ModeRule::Kind::kBackups)
    std::printf("gradients that came too late: %lld\n", static_cast<long long>(found.dropped));
  if (found.waits_for_servers) std::printf("the parameter servers bound it: --servers says how many there are\n");
}

/// Simulates ranks with clocks of their own, and returns the trace.
std::string run_mode(const SimulateCommand& command, const PlannedWorld& world, const TimingFiles& files,
                     const WorldOptions& options, Existing existing) {
  std::optional<SimulatedOrder> order;
  if (!command.order.empty())
    order = value_or_throw(SimulatedOrder::make(world.plan, files.profile, std::max(files.servers, 1)));
  const SimulatedMode mode = simulated_mode(world, files, options);
  print_mode(world, files, options, mode);
  if (order) write_order(*order, mode, command.order, existing);
  return mode.run.trace;
}

/// Simulates ranks that wait for each other in each step, prints the results, and returns the trace.
std::string print_synchronous(const PlannedWorld& world, const TimingFiles& files, const WorldOptions& options) {
  const PredictedStep alike = predicted_step(world.plan, files, world.topology.local_world_size);
  const SimulatedWorld found = simulated(world, files, options);
  std::printf("%s, %d ranks, %lld steps: %s s a step (a tenth below %s, a tenth above %s)\n",
              name_of_placement(world.strategy).c_str(), world.topology.world_size,
              static_cast<long long>(options.steps), number_text(found.mean_s, "%.4f").c_str(),
              number_text(found.p10_s, "%.4f").c_str(), number_text(found.p90_s, "%.4f").c_str());
  if (!found.dealt.empty()) {
    const auto [fewest, most] = std::ranges::minmax(found.dealt);
    std::printf("dealt by speed: a rank computes %lld to %lld microbatches of a step\n", static_cast<long long>(fewest),
                static_cast<long long>(most));
  }
  if (has_backups(world)) std::printf("%s", to_text(backup_gain(world, files, options, &found)).c_str());
  std::printf("ranks that are alike: %s s, bound by %s; a rank alone works for %s s\n",
              number_text(alike.seconds, "%.4f").c_str(), name_of(alike.bound).c_str(),
              number_text(alike.work_s(), "%.4f").c_str());
  for (const std::string& left_out : alike.left_out) std::printf("not counted: %s\n", left_out.c_str());
  const std::vector<ScaledWorld> scaled =
      scaled_worlds(ModelShapes(world.config), world.strategy, world.topology, files);
  std::printf("\n%s", to_text(scaled).c_str());
  if (!scaled.empty() && scaled.front().alone_s)
    std::printf("with these ranks, which are not alike: %s %% beside one rank\n",
                number_text(100 * *scaled.front().alone_s / found.mean_s, "%.1f").c_str());
  return found.trace;
}

}  // namespace

int run_simulate(const SimulateCommand& command) {
  return run([&] {
    const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
    throw_if_error(check_outputs({{"--trace", command.trace, {}}, {"--order", command.order, {}}},
                                 {{"--links", command.timing.links, {}}, {"--profile", command.timing.profile, {}}},
                                 existing));
    const WorldOptions options = options_of(command);
    const PlannedWorld world = plan_of_world(command.world);
    const TimingFiles files = read_timing(command.timing);
    const bool is_synchronous = world.strategy.sync.type == SyncType::kEachStep && command.order.empty();
    const std::string trace =
        is_synchronous ? print_synchronous(world, files, options) : run_mode(command, world, files, options, existing);
    if (command.trace.empty()) return;
    throw_if_error(write_output(command.trace, "{\"traceEvents\":[" + trace + "]}\n", existing, "simulate"));
  });
}

}  // namespace tessera::app
