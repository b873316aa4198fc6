#include "planner/simulated_world.h"

#include <algorithm>
#include <cmath>

#include "planner/modes/backup_clock.h"
#include "planner/step_clock.h"
#include "planner/step_trace.h"
#include "runtime/base/status.h"
#include "sharding/layout/plan/microbatch_deal.h"

namespace tessera {
namespace {

/// Returns the number of microbatches that each rank computes once they are dealt by the ranks' speeds. The result is
/// empty if no microbatches are dealt.
std::vector<std::int64_t> dealt_by(const RankSpeeds& speeds, const MicrobatchOrder& order) {
  if (order.longest == 0 || order.ranks == 1) return {};
  std::vector<double> seconds;
  std::vector<std::int64_t> even;
  for (int rank = 0; rank < order.ranks; ++rank) {
    seconds.push_back(speeds.of_work(rank));
    even.push_back(order.count_of(rank));
  }
  std::vector<std::int64_t> counts(even.size());
  share_out(order, seconds, counts);
  return is_worth_a_deal(counts, even, seconds) ? counts : even;
}

/// The factors by which the work of a rank in a step takes longer than in the profile.
class WorkFactors {
 public:
  /// `dealt`: SimulatedWorld::dealt. `each`: the microbatches of a rank in the script.
  WorkFactors(const StepScript& script, const RankSpeeds& speeds, const std::vector<std::int64_t>& dealt,
              std::int64_t each)
      : script_(script), speeds_(speeds), each_(each) {
    for (const std::int64_t count : dealt) of_deal_.push_back(static_cast<double>(count) / static_cast<double>(each));
    of_step_ = of_deal_;
    const auto first = std::ranges::find_if(script.instructions, computes);
    first_ = static_cast<std::size_t>(first - script.instructions.begin());
  }

  /// Plays a step whose ranks also compute microbatches of slower ranks. From now on, ranks compute for as long as they
  /// do in this step. `forward_share`: the part of a microbatch's seconds that forward takes.
  BackupStep back_up(std::int64_t step, const MicrobatchOrder& order, double forward_share) {
    std::vector<BackupRank> ranks;
    std::vector<double> each_s;  // [rank]: seconds of `each_` microbatches
    for (int rank = 0; rank < order.ranks; ++rank) {
      const double seconds = each_s.emplace_back(compute_s(step, rank)) / static_cast<double>(each_);
      ranks.push_back({speeds_.stall_s(step, rank), forward_share * seconds, (1 - forward_share) * seconds});
    }
    BackupStep played = play_backups(order, ranks);
    of_step_ = of_deal_;
    if (played.made_again == 0 && played.twice == 0) return played;  // each rank computes its own run
    for (std::size_t rank = 0; rank < ranks.size(); ++rank)
      of_step_[rank] = each_s[rank] > 0 ? (played.ends_s[rank] - ranks[rank].first_s) / each_s[rank] : 0.0;
    return played;
  }

  double operator()(std::int64_t step, int rank, std::size_t instruction) const {
    const Instruction& each = script_.instructions[instruction];
    if (each.spending == Spending::kReduction) return 1;  // memory, not the rank, limits the speed of sums
    if (each.spending != Spending::kCompute) return speeds_.of_work(rank);
    double factor = speeds_.of_compute(step, rank, instruction);
    if (!of_step_.empty()) factor *= of_step_[static_cast<std::size_t>(rank)];
    return instruction == first_ ? factor + speeds_.stall_s(step, rank) / each.seconds : factor;
  }

 private:
  static bool computes(const Instruction& instruction) {
    return instruction.kind == Instruction::Kind::kWork && instruction.spending == Spending::kCompute &&
           instruction.seconds > 0;
  }
  /// Returns the seconds for which a rank would compute the script's microbatches in a step.
  double compute_s(std::int64_t step, int rank) const {
    double seconds = 0;
    for (std::size_t i = 0; i < script_.instructions.size(); ++i) {
      if (computes(script_.instructions[i]))
        seconds += script_.instructions[i].seconds * speeds_.of_compute(step, rank, i);
    }
    return seconds;
  }

  const StepScript& script_;
  const RankSpeeds& speeds_;
  const std::int64_t each_;      ///< microbatches of a rank in the script
  std::vector<double> of_deal_;  ///< [rank]: factor because of the dealt microbatches; empty: all are 1
  std::vector<double> of_step_;  ///< `of_deal_`, or the factors of the step that `back_up` played last
  std::size_t first_ = 0;        ///< index of the first instruction that computes
};

/// Returns `order`, changed so that each rank has the number of microbatches in `dealt`.
MicrobatchOrder order_of(MicrobatchOrder order, const std::vector<std::int64_t>& dealt) {
  order.begins.clear();
  std::int64_t begin = 0;
  for (const std::int64_t count : dealt) {
    order.begins.push_back(begin);
    begin += count;
  }
  return order;
}

/// Returns the part of a microbatch's seconds that forward takes.
double forward_share_of(const StepProfile& profile) {
  double forward_s = 0, all_s = 0;
  for (const ProfileEntry& entry : profile.entries) {
    all_s += entry.seconds;
    if (entry.pass == RoundPass::kForward) forward_s += entry.seconds;
  }
  return all_s > 0 ? forward_s / all_s : 0.0;
}

/// Returns the smallest number in `sorted` that at least a share `p` of all numbers do not exceed. REQUIRES: `sorted`
/// is sorted and not empty.
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
  TESSERA_RETURN_IF_ERROR(check_world(options, mesh.world_size()));
  TESSERA_ASSIGN_OR_RETURN(const StepScript script, script_of_step(plan, profile, links));
  StepClock clock(script, mesh.replicate_size, mesh.shard_size);
  const RankSpeeds speeds(options, clock.ranks());
  StepTrace trace(options.traced, names_of_units(plan));
  SimulatedWorld world;
  world.dealt = dealt_by(speeds, plan.order());
  const MicrobatchOrder order = order_of(plan.order(), world.dealt);
  const bool has_backups = order.backups > 0 && order.ranks > 1;
  WorkFactors factors(script, speeds, world.dealt, plan.wire().accumulation);
  std::vector<double> ends(static_cast<std::size_t>(clock.ranks()), 0.0);
  double offset_s = 0;
  for (std::int64_t step = 0; step < options.steps; ++step) {
    // The times of each step are counted from the moment when the first rank ended the previous step.
    const double first = std::ranges::min(ends), last = std::ranges::max(ends) - first;
    offset_s += first;
    for (double& end : ends) end -= first;
    trace.begin_step(offset_s);
    if (has_backups) {
      const BackupStep played = factors.back_up(step, order, forward_share_of(profile));
      world.made_again += static_cast<double>(played.made_again) / static_cast<double>(options.steps);
      world.twice += static_cast<double>(played.twice) / static_cast<double>(options.steps);
    }
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
