#include "planner/simulated_world.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "planner/jitter.h"
#include "planner/step_clock.h"
#include "planner/step_trace.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

absl::Status refuse(const std::string& what) { return make_error(ExitCode::kUsage, "simulated world: " + what); }

bool is_within(double value, double least, double most) { return value >= least && value <= most; }

absl::Status check(const WorldOptions& options, int ranks) {
  constexpr double kMostJitter = 10, kMostFactor = 1e6;
  constexpr std::int64_t kMostSteps = 100000;
  const auto is_rank = [&](int rank) { return rank >= 0 && rank < ranks; };
  if (ranks > SimulatedWorld::kMostRanks)
    return refuse(fmt::format("wants at most {} ranks, got a mesh of {}. [T0630] hint: simulate fewer, and scale",
                              SimulatedWorld::kMostRanks, ranks));
  if (!is_within(options.jitter, 0, kMostJitter))
    return refuse(
        fmt::format("jitter must be from 0 to {}, got {}. [T0631] hint: 0.05 is usual", kMostJitter, options.jitter));
  if (options.steps < 1 || options.steps > kMostSteps)
    return refuse(fmt::format("steps must be from 1 to {}, got {}. [T0632] hint: a few dozen tell enough", kMostSteps,
                              options.steps));
  for (const auto& [rank, factor] : options.stragglers) {
    if (!is_rank(rank))
      return refuse(
          fmt::format("a straggler is rank {}, and the mesh has {}. [T0633] hint: ranks count from 0", rank, ranks));
    if (!is_within(factor, 0, kMostFactor) || factor == 0)
      return refuse(fmt::format(
          "the factor of straggler {} must be above 0 and at most {:g}, got {}. [T0634] hint: 2 takes twice as long",
          rank, kMostFactor, factor));
  }
  for (const int rank : options.traced) {
    if (!is_rank(rank))
      return refuse(
          fmt::format("a traced rank is {}, and the mesh has {}. [T0635] hint: ranks count from 0", rank, ranks));
  }
  return absl::OkStatus();
}

/// The factors by which a rank's work takes longer in one step than in the profile.
class WorkFactors {
 public:
  WorkFactors(const StepScript& script, const WorldOptions& options, int ranks)
      : script_(script), jitter_(options.jitter, options.seed), of_rank_(static_cast<std::size_t>(ranks), 1.0) {
    for (const auto& [rank, factor] : options.stragglers) of_rank_[static_cast<std::size_t>(rank)] = factor;
  }

  double operator()(std::int64_t step, int rank, std::size_t instruction) const {
    const Spending spending = script_.instructions[instruction].spending;
    if (spending == Spending::kReduction) return 1;  // memory, not the rank, limits the speed of sums
    const double factor = of_rank_[static_cast<std::size_t>(rank)];
    return spending == Spending::kCompute ? factor * jitter_.factor(step, rank, instruction) : factor;
  }

 private:
  const StepScript& script_;
  const Jitter jitter_;
  std::vector<double> of_rank_;
};

/// Returns the smallest number of seconds that is not exceeded by a share `p` of all numbers. REQUIRES: sorted, not
/// empty.
double quantile(const std::vector<double>& sorted, double p) {
  const auto count = static_cast<double>(sorted.size());
  return sorted[static_cast<std::size_t>(std::max(std::ceil(p * count) - 1, 0.0))];
}

/// Returns the mean. If all numbers are equal, the mean is that number to the last bit.
double mean_of(const std::vector<double>& seconds) {
  double more = 0;
  for (const double each : seconds) more += each - seconds[0];
  return seconds[0] + more / static_cast<double>(seconds.size());
}

void summarise(SimulatedWorld& world) {
  std::vector<double> sorted = world.seconds;
  std::ranges::sort(sorted);
  world.mean_s = mean_of(world.seconds);
  world.p10_s = quantile(sorted, 0.1);
  world.p90_s = quantile(sorted, 0.9);
}

std::vector<std::string> names_of_units(const MemoryPlan& plan) {
  std::vector<std::string> names;
  for (const UnitShape& unit : plan.units()) names.push_back(unit.name);
  return names;
}

}  // namespace

absl::StatusOr<SimulatedWorld> simulate_world(const MemoryPlan& plan, const StepProfile& profile,
                                              const MeshLinks& links, const WorldOptions& options) {
  const MeshPosition& mesh = plan.placement().mesh;
  TESSERA_RETURN_IF_ERROR(check(options, mesh.world_size()));
  TESSERA_ASSIGN_OR_RETURN(const StepScript script, script_of_step(plan, profile, links));
  StepClock clock(script, mesh.replicate_size, mesh.shard_size);
  const WorkFactors factors(script, options, clock.ranks());
  StepTrace trace(options.traced, names_of_units(plan));
  SimulatedWorld world;
  std::vector<double> ends(static_cast<std::size_t>(clock.ranks()), 0.0);
  double offset_s = 0;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    // The times of each step are counted from the moment when the first rank ended the step before.
    const double first = std::ranges::min(ends), last = std::ranges::max(ends) - first;
    offset_s += first;
    for (double& end : ends) end -= first;
    trace.begin_step(offset_s);
    const auto factor = [&](int rank, std::size_t instruction) { return factors(step, rank, instruction); };
    TESSERA_RETURN_IF_ERROR(clock.play(ends, factor, options.traced.empty() ? nullptr : &trace));
    for (std::size_t rank = 0; rank < ends.size(); ++rank) ends[rank] = clock.times(static_cast<int>(rank)).end_s;
    world.seconds.push_back(std::ranges::max(ends) - last);
  }
  summarise(world);
  world.trace = trace.events_as_json();
  return world;
}

}  // namespace tessera
