#include "planner/modes/mode_cost.h"

#include <algorithm>
#include <numeric>

#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Returns the seconds that a byte takes while other ranks compute.
double busy_beta(const OperationFit& fit) { return std::max(fit.beta_s_per_byte, fit.busy_beta_s_per_byte); }

/// Returns, for each unit, the seconds in which its trainable values go over `links`.
std::vector<double> unit_seconds(const MemoryPlan& plan, const Links& links) {
  std::vector<double> seconds;
  for (const UnitShape& unit : plan.units())
    seconds.push_back(4 * static_cast<double>(unit.trainable_numel()) * busy_beta(links.all_gather));
  return seconds;
}

/// Returns the seconds for which a step waits for pulls. A rank asks for a unit when the rank begins to use the
/// preceding unit.
double exposed_pulls(const StepProfile& profile, const std::vector<int>& units, const std::vector<double>& pull_s) {
  std::vector<char> is_pulled(pull_s.size(), 0);
  double exposed_s = 0, since_s = 0;  // since_s: compute since the latest unit was pulled
  for (std::size_t i = 0; i < units.size(); ++i) {
    const auto unit = static_cast<std::size_t>(units[i]);
    if (is_pulled[unit] == 0) {
      exposed_s += std::max(0.0, pull_s[unit] - since_s);
      is_pulled[unit] = 1;
      since_s = 0;
    }
    since_s += profile.entries[i].seconds;
  }
  return exposed_s;
}

/// Returns the seconds for which a step waits, after its last backward, until its gradients are sent. The gradients of
/// a unit are sent once the unit's last operation in that backward has made them, one unit after the other.
double exposed_pushes(const StepProfile& profile, const std::vector<int>& units, const std::vector<double>& push_s) {
  std::vector<std::size_t> last(push_s.size(), units.size());
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (profile.entries[i].pass == RoundPass::kBackward) last[static_cast<std::size_t>(units[i])] = i;
  }
  double now_s = 0, sent_s = 0;
  for (std::size_t i = 0; i < units.size(); ++i) {
    if (profile.entries[i].pass != RoundPass::kBackward) continue;
    now_s += profile.entries[i].seconds;
    const auto unit = static_cast<std::size_t>(units[i]);
    if (last[unit] == i) sent_s = std::max(sent_s, now_s) + push_s[unit];
  }
  return std::max(0.0, sent_s - now_s);
}

ModeRule rule_of(const SyncConfig& sync) {
  if (sync.type == SyncType::kBackups) return {.kind = ModeRule::Kind::kBackups, .spare = sync.backups};
  ModeRule rule{.kind = ModeRule::Kind::kAsynchronous};
  if (!sync.is_hogwild()) rule.max_staleness = sync.asynchronous.max_staleness;
  return rule;
}

std::vector<std::string> what_is_not_predicted(const SyncConfig& sync, const Links& links) {
  std::vector<std::string> left_out;
  if (sync.has_servers()) {
    left_out.push_back("the host's link, which its ranks share");
  } else {
    left_out.push_back("waits of ranks for each other's locks, and for memory that all of them read and write");
    if (links.transport != "host")
      left_out.push_back("memory that ranks share: the links are those of " + links.transport +
                         " (--links-inside takes links that were measured on one host)");
  }
  if (sync.type == SyncType::kAsynchronous && sync.asynchronous.delay_compensation.lambda != 0)
    left_out.push_back("the arithmetic of delay_compensation");
  return left_out;
}

}  // namespace

double ModeCost::compute_s() const {
  return static_cast<double>(microbatches) * std::accumulate(pieces_s.begin(), pieces_s.end(), 0.0) + rest_s;
}

ModeCost cost_of_compute(const MemoryPlan& plan, const StepProfile& profile) {
  ModeCost cost;
  for (const ProfileEntry& entry : profile.entries) cost.pieces_s.push_back(entry.seconds);
  cost.microbatches = plan.wire().accumulation;
  return cost;
}

absl::StatusOr<ModeCost> mode_cost(const MemoryPlan& plan, const StepProfile& profile, const Links& links,
                                   int servers) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<int> units, units_of(profile, plan));
  const SyncConfig& sync = plan.update().outer;
  if (sync.asynchronous.replica_ranks > 1)
    return make_error(
        ExitCode::kConfig,
        "/sync/replica_ranks: the time in which the ranks of a replica sum gradients and gather values is "
        "not predicted. [T1064] hint: leave the key out of the strategy, or plan without --links");
  const int ranks = plan.placement().mesh.world_size();
  ModeCost cost = cost_of_compute(plan, profile);
  cost.rule = rule_of(sync);
  cost.rest_s = profile.rest_seconds;
  cost.left_out = what_is_not_predicted(sync, links);
  name_units_without_times(profile, plan, cost.left_out);
  std::int64_t numel = 0;
  for (const UnitShape& unit : plan.units()) numel += unit.trainable_numel();
  const double bytes = 4 * static_cast<double>(numel);
  const double update_s = profile.update_seconds > 0 ? profile.update_seconds * static_cast<double>(numel) /
                                                           static_cast<double>(profile.updated_elements)
                                                     : 0.0;
  if (sync.has_servers()) {
    const std::vector<double> pull_s = unit_seconds(plan, links);
    std::vector<double> push_s = pull_s;
    const MemoryPlan::ServedBytes served = plan.served_bytes();
    const double sent_a_byte = served.received > 0 ? static_cast<double>(served.sent / served.received) : 1.0;
    for (double& seconds : push_s) seconds *= sent_a_byte;  // delay_compensation sends the values that were pulled, too
    const double served_s = update_s / servers;
    cost.costs.pull_s = links.all_gather.alpha_s + exposed_pulls(profile, units, pull_s);
    cost.costs.push_s = links.all_gather.alpha_s + exposed_pushes(profile, units, push_s) + served_s;
    cost.served_s = std::max(served_s, std::accumulate(push_s.begin(), push_s.end(), 0.0) / servers);
    return cost;
  }
  if (!sync.is_hogwild()) cost.costs.pull_s = bytes * busy_beta(links.all_gather);
  if (sync.type != SyncType::kBackups) {
    cost.costs.push_s = update_s;
    return cost;
  }
  const int needed = ranks - static_cast<int>(sync.backups);
  const std::int64_t part = 4 * ((numel + needed - 1) / needed);
  constexpr std::int64_t kNumbers = 72;  // bytes about a step that a rank sends to each other rank
  cost.costs.meet_s = links.cost(links.reduce_scatter, needed, (needed - 1) * part).busy_seconds() +
                      links.cost(links.small, needed, (needed - 1) * kNumbers).seconds() + update_s / needed;
  return cost;
}

}  // namespace tessera
