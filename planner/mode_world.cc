#include "planner/mode_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "planner/outer_cost.h"
#include "planner/step_trace.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Returns the seconds that a rank computes in a step. The time of each piece of work varies separately.
double jittery_seconds(const ModeCost& cost, const RankSpeeds& speeds, int rank, std::int64_t step) {
  double seconds = cost.rest_s * speeds.of_work(rank);
  std::size_t piece = 0;
  for (std::int64_t microbatch = 0; microbatch < cost.microbatches; ++microbatch) {
    for (const double piece_s : cost.pieces_s) seconds += piece_s * speeds.of_compute(step, rank, piece++);
  }
  return seconds;
}

std::string trace_of(const ModeTimeline& timeline, const ModeRule& rule, const std::vector<int>& traced) {
  StepTrace trace(traced, {});
  const char* const end = rule.kind == ModeRule::Kind::kAsynchronous ? "push" : "meet";
  for (const ModeStep& step : timeline.steps) {
    trace.span(step.rank, 0, "pull", -1, step.begin_s, step.pulled_s);
    trace.span(step.rank, 0, "compute", -1, step.pulled_s, step.computed_s);
    trace.span(step.rank, 0, "wait", -1, step.computed_s, step.pushing_s);
    trace.span(step.rank, 0, end, -1, step.pushing_s, step.pushed_s);
  }
  return trace.events_as_json();
}

}  // namespace

absl::StatusOr<ModeWorld> simulate_mode(const ModeCost& cost, int ranks, const WorldOptions& options) {
  TESSERA_RETURN_IF_ERROR(check_world(options, ranks));
  constexpr std::int64_t kLeastPieces = 64;  // simulating a rank's step costs about as much as this many pieces
  const std::int64_t pieces = options.jitter > 0 ? cost.microbatches * std::ssize(cost.pieces_s) : 1;
  if (options.steps * ranks > kMostModePieces / std::max(pieces, kLeastPieces))
    return make_error(ExitCode::kUsage,
                      fmt::format("simulated world: {} steps of {} ranks, each with {} pieces of work that vary, take "
                                  "too long to simulate. [T1055] hint: a few dozen steps tell enough",
                                  options.steps, ranks, pieces));
  const RankSpeeds speeds(options, ranks);
  const double even_s = cost.compute_s();
  ModeTimeline timeline = play_mode({cost.rule, cost.costs, ranks, options.steps}, [&](int rank, std::int64_t step) {
    const double seconds =
        options.jitter > 0 ? jittery_seconds(cost, speeds, rank, step) : even_s * speeds.of_work(rank);
    return seconds + speeds.stall_s(step, rank);
  });
  ModeWorld world;
  world.dropped = timeline.dropped;
  world.steps.resize(static_cast<std::size_t>(ranks), 0);
  for (const ModeStep& step : timeline.steps) ++world.steps[static_cast<std::size_t>(step.rank)];
  const double served_s = cost.served_s * static_cast<double>(timeline.steps.size());
  world.waits_for_servers = served_s > timeline.seconds();
  world.seconds = std::max(served_s, timeline.seconds());
  if (cost.rule.kind == ModeRule::Kind::kAsynchronous) {
    const std::vector<std::int64_t> ages = timeline.ages();
    const auto sum = static_cast<double>(std::accumulate(ages.begin(), ages.end(), std::int64_t{0}));
    world.staleness_mean = sum / static_cast<double>(ages.size());
    world.staleness_max = std::ranges::max(ages);
  }
  if (!options.traced.empty()) world.trace = trace_of(timeline, cost.rule, options.traced);
  world.timeline = std::move(timeline);
  return world;
}

ModeCost cost_of_outer_steps(const PredictedStep& step, const MemoryPlan& plan, const StepProfile& profile,
                             const MeshLinks& links) {
  const std::int64_t every = plan.update().outer.every;
  const double inner_s = step.seconds - step.exposed_outer_s;
  OuterCost outer = outer_cost(plan, inner_s, links);
  ModeCost cost = cost_of_compute(plan, profile);
  cost.rule = {.kind = ModeRule::Kind::kMeeting, .every = every, .delay = outer.delay};
  cost.rest_s = std::max(0.0, inner_s - cost.compute_s());
  cost.costs.meet_s = step.exposed_outer_s * static_cast<double>(every);
  cost.costs.fragments = std::move(outer.fragments);
  cost.left_out = step.left_out;
  return cost;
}

}  // namespace tessera
