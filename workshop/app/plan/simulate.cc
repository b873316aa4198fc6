#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "planner/simulated_world.h"
#include "runtime/border/throw.h"
#include "runtime/config/placement_rows.h"
#include "tessera/run.h"
#include "workshop/app/commands.h"
#include "workshop/app/output_files.h"
#include "workshop/app/plan/plan_of_world.h"
#include "workshop/app/plan/plan_time.h"
#include "workshop/app/plan/scaled_worlds.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

/// Reads "7=1.5": rank and factor.
std::pair<int, double> straggler_of(const std::string& text) {
  int rank = 0, read = 0;
  double factor = 0;
  const bool fits = std::sscanf(text.c_str(), "%d=%lf%n", &rank, &factor, &read) == 2;
  if (!fits || static_cast<std::size_t>(read) != text.size())
    throw Error(ExitCode::kUsage,
                "simulate: --straggler \"" + text + "\" is no rank and factor. [T0040] hint: write them such as 7=1.5");
  return {rank, factor};
}

WorldOptions options_of(const SimulateCommand& command) {
  WorldOptions options;
  options.jitter = command.jitter;
  options.seed = command.seed;
  options.steps = command.steps;
  for (const std::string& straggler : command.stragglers) options.stragglers.insert(straggler_of(straggler));
  if (!command.trace.empty()) {
    for (int rank = 0; rank < command.world.world_size && rank < command.traced_ranks; ++rank)
      options.traced.push_back(rank);
  }
  return options;
}

}  // namespace

int run_simulate(const SimulateCommand& command) {
  return run([&] {
    const Existing existing = command.overwrite ? Existing::kReplaced : Existing::kKept;
    throw_if_error(check_outputs({{"--trace", command.trace, {}}},
                                 {{"--links", command.timing.links, {}}, {"--profile", command.timing.profile, {}}},
                                 existing));
    const PlannedWorld world = plan_of_world(command.world);
    if (world.strategy.sync.makes_outer_steps())
      throw Error(ExitCode::kConfig,
                  "/sync/type: replicas that meet every now and then are not simulated. [T0041] hint: tessera plan "
                  "--links predicts the mean of their steps; or leave \"sync\" out of the strategy");
    expect_predictable(world.plan);
    const TimingFiles files = read_timing(command.timing);
    const MeshLinks links = files.links_of(world.plan.placement(), world.topology.local_world_size);
    const SimulatedWorld simulated =
        value_or_throw(simulate_world(world.plan, files.profile, links, options_of(command)));
    const PredictedStep alike = predicted_step(world.plan, files, world.topology.local_world_size);
    std::printf("%s, %d ranks, %lld steps: %s s a step (a tenth below %s, a tenth above %s)\n",
                name_of_placement(world.strategy).c_str(), command.world.world_size,
                static_cast<long long>(command.steps), number_text(simulated.mean_s, "%.4f").c_str(),
                number_text(simulated.p10_s, "%.4f").c_str(), number_text(simulated.p90_s, "%.4f").c_str());
    std::printf("ranks that are alike: %s s, bound by %s; a rank alone works for %s s\n",
                number_text(alike.seconds, "%.4f").c_str(), name_of(alike.bound).c_str(),
                number_text(alike.work_s(), "%.4f").c_str());
    const std::vector<ScaledWorld> scaled =
        scaled_worlds(ModelShapes(world.config), world.strategy, world.topology, files);
    std::printf("\n%s", to_text(scaled).c_str());
    if (!scaled.empty() && scaled.front().alone_s)
      std::printf("with these ranks, which are not alike: %s %% beside one rank\n",
                  number_text(100 * *scaled.front().alone_s / simulated.mean_s, "%.1f").c_str());
    if (command.trace.empty()) return;
    throw_if_error(write_output(command.trace, "{\"traceEvents\":[" + simulated.trace + "]}\n", existing, "simulate"));
  });
}

}  // namespace tessera::app
