#include "runtime/comm/rounds/measured_groups.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/rounds/call_work.h"
#include "runtime/comm/rounds/link_fit.h"
#include "runtime/comm/rounds/timed_calls.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kFirstBytes = 512, kMostBytes = 2 << 20, kNextTimes = 8;
constexpr std::size_t kLeastLastBytes = 32 << 10;  // smaller calls do not show what a byte costs
constexpr double kMostSeconds = 0.05;              // limit of a timed call
constexpr double kMostSecondsInAll = 2;            // limit of all calls of a set of ranks
constexpr int kTimes = 4, kProbes = 2;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// The algorithm of a group's calls: a fixed one while the calls are timed, and the fit's choice afterwards.
class Choice {
 public:
  void use(Algorithm algorithm) {
    const MutexLock lock(mutex_);
    algorithm_ = algorithm;
  }
  void use(ChooseAlgorithm by_fit) {
    const MutexLock lock(mutex_);
    by_fit_ = std::move(by_fit);
  }
  Algorithm operator()(Operation operation, int ranks, DType dtype, std::size_t bytes) {
    const MutexLock lock(mutex_);
    return by_fit_ ? by_fit_(operation, ranks, dtype, bytes) : algorithm_;
  }

 private:
  Mutex mutex_;
  Algorithm algorithm_ ABSL_GUARDED_BY(mutex_) = Algorithm::kDirect;
  ChooseAlgorithm by_fit_ ABSL_GUARDED_BY(mutex_);
};

/// The calls of a network that are timed, and the limit of their time.
struct Extent {
  std::size_t last_bytes = kFirstBytes;  ///< calls up to this size are timed, unless the limit has passed
  double most_seconds = kMostSecondsInAll;
};

/// Times every algorithm, for growing calls. The times are the same on all ranks, and so is the size of the last calls.
absl::StatusOr<std::vector<TimedCall>> time_network(Collectives& group, Choice& choice, const Extent& extent) {
  std::vector<TimedCall> timed;
  double spent = 0;
  for (std::size_t bytes = kFirstBytes; bytes <= kMostBytes; bytes *= kNextTimes) {
    std::vector<TimedCall> calls = calls_to_time(group.size(), bytes);
    // All ranks have the same times of the earlier calls, so they choose the same number. A call without any time would
    // seem to cost nothing.
    const auto times = [&](const TimedCall&) {
      double so_far = spent;
      for (const TimedCall& call : calls) so_far += call.median_s() * (kTimes + 1);
      return so_far > extent.most_seconds ? 1 : kTimes;
    };
    TESSERA_RETURN_IF_ERROR(time_calls(
        group, calls, [&](Algorithm algorithm) { choice.use(algorithm); }, times));
    double slowest = 0, of_size = 0;
    for (TimedCall& call : calls) {
      slowest = std::max(slowest, call.median_s());
      of_size += call.median_s() * (kTimes + 1);  // the warm-up is counted too
      timed.push_back(std::move(call));
    }
    spent += of_size;
    if (spent > extent.most_seconds) break;
    if (bytes < extent.last_bytes) continue;
    if (slowest * kNextTimes > kMostSeconds || spent + of_size * kNextTimes > extent.most_seconds) break;
  }
  return timed;
}

/// Returns the fit of the group's first rank, since processors may differ in the last bits. The fit is empty if the
/// time limit passed before all calls of `extent` were timed. The call is collective.
absl::StatusOr<LinkFit> measure(Collectives& group, Choice& choice, const Extent& extent) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<TimedCall> timed, time_network(group, choice, extent));
  if (std::ranges::max(timed, {}, &TimedCall::bytes).bytes < extent.last_bytes) return LinkFit{};
  LinkFit fit = fit_calls(group.size(), timed);
  TESSERA_RETURN_IF_ERROR(group.broadcast("fit", &fit, sizeof(fit), 0).wait());
  return fit;
}

/// Returns the seconds that all timed calls up to kLeastLastBytes take at the costs of `guess`.
double seconds_of_calls(int ranks, const LinkFit& guess) {
  double seconds = 0;
  for (std::size_t bytes = kFirstBytes; bytes <= kLeastLastBytes; bytes *= kNextTimes)
    for (const TimedCall& call : calls_to_time(ranks, bytes))
      seconds +=
          (kTimes + 1) * guess.seconds_of(work_of(call.operation, call.algorithm, ranks, call.dtype, call.bytes));
  return seconds;
}

/// Returns the costs that the probes show. The time of a single probe counts as a cost of messages only, which makes
/// the lowest estimate: a ring of many ranks has many rounds, but no more messages than a direct call.
LinkFit guess_of(int ranks, std::span<const TimedCall> probes) {
  if (probes.size() == 1) return {.message_s = probes.front().median_s() / (ranks - 1)};
  return fit_calls(ranks, probes);
}

/// Returns an estimate of the seconds that the timed calls up to kLeastLastBytes take. The call is collective, and
/// returns the estimate of the group's first rank on all ranks. The group makes a few all-gathers in two ways, first
/// small ones and then larger ones. It stops as soon as the estimate is above `most_seconds`.
absl::StatusOr<double> estimated_seconds(Collectives& group, Choice& choice, double most_seconds) {
  std::vector<TimedCall> probes;
  double estimate = 0;
  for (std::size_t bytes = kFirstBytes; bytes <= kLeastLastBytes; bytes *= kNextTimes) {
    for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kDoubling}) {
      probes.push_back({.operation = Operation::kAllGather, .bytes = bytes, .algorithm = algorithm});
      TESSERA_RETURN_IF_ERROR(time_calls(
          group, std::span(probes).last(1), [&](Algorithm way) { choice.use(way); },
          [](const TimedCall&) { return kProbes; }));
      if (group.rank() == 0) estimate = seconds_of_calls(group.size(), guess_of(group.size(), probes));
      TESSERA_RETURN_IF_ERROR(group.broadcast("fit", &estimate, sizeof(estimate), 0).wait());
      if (estimate > most_seconds) return estimate;
    }
  }
  return estimate;
}

class MeasuredGroups {
 public:
  MeasuredGroups(JoinAndChoose join, MeasureRule rule) : join_(std::move(join)), rule_(std::move(rule)) {}

  absl::StatusOr<std::shared_ptr<Collectives>> join(const Group& group) {
    if (rule_.may_measure && !rule_.may_measure(group)) return join_(group, nullptr);
    if (const std::optional<LinkFit> known = fit_of(group.world_ranks)) return join_(group, from_least(*known));
    const auto choice = std::make_shared<Choice>();
    TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Collectives> joined,
                             join_(group, [choice](Operation operation, int ranks, DType dtype, std::size_t bytes) {
                               return (*choice)(operation, ranks, dtype, bytes);
                             }));
    double left = kMostSecondsInAll;
    if (is_bounded()) {
      TESSERA_ASSIGN_OR_RETURN(left, seconds_left(*joined));
    }
    const auto begin = Clock::now();  // all ranks of the group are here
    TESSERA_ASSIGN_OR_RETURN(const LinkFit fit, fit_of_network(group, *joined, *choice, left));
    choice->use(from_least(fit));
    const MutexLock lock(mutex_);
    fits_.emplace(group.world_ranks, fit);
    spent_s_ += seconds_since(begin);
    return joined;
  }

 private:
  std::optional<LinkFit> fit_of(const std::vector<int>& world_ranks) {
    const MutexLock lock(mutex_);
    const auto known = fits_.find(world_ranks);
    return known == fits_.end() ? std::nullopt : std::optional(known->second);
  }

  /// Returns the choice by `fit` for calls of rule_.least_bytes and more.
  ChooseAlgorithm from_least(const LinkFit& fit) const {
    return [least = rule_.least_bytes, by_fit = choose_by(fit)](Operation operation, int ranks, DType dtype,
                                                                std::size_t bytes) {
      return bytes < least ? Algorithm::kDirect : by_fit(operation, ranks, dtype, bytes);
    };
  }

  /// Returns the seconds for which the rank that has measured longest may still measure. The call is collective.
  absl::StatusOr<double> seconds_left(Collectives& joined) {
    std::int64_t spent_ns = 0;
    {
      const MutexLock lock(mutex_);
      spent_ns = static_cast<std::int64_t>(spent_s_ * 1e9);
    }
    TESSERA_RETURN_IF_ERROR(take_slowest(joined, std::span(&spent_ns, 1)));
    return rule_.most_seconds - static_cast<double>(spent_ns) * 1e-9;
  }

  /// Measures in about `left` seconds at most, and returns the fit. If a bounded measurement would take longer, the
  /// result is an empty fit, with which calls use kDirect.
  absl::StatusOr<LinkFit> fit_of_network(const Group& group, Collectives& joined, Choice& choice, double left) const {
    const auto tell = [&](const std::string& text) {
      if (group.rank == 0) log_info(group.key() + ": " + text);
    };
    Extent extent;
    if (is_bounded()) {
      if (left <= 0) {  // the same on all ranks
        tell("not measured, since no time is left; calls go directly");
        return LinkFit{};
      }
      TESSERA_ASSIGN_OR_RETURN(const double estimate, estimated_seconds(joined, choice, left));
      if (estimate > left) {
        tell(fmt::format("not measured, which would take {:.1f} s of {:.1f} s that are left; calls go directly",
                         estimate, left));
        return LinkFit{};
      }
      extent = {.last_bytes = kLeastLastBytes, .most_seconds = left};
    }
    TESSERA_ASSIGN_OR_RETURN(const LinkFit fit, measure(joined, choice, extent));
    tell(fit == LinkFit{} ? "not measured to the end, since its time was over; calls go directly"
                          : "measured: " + text_of(fit));
    return fit;
  }

  bool is_bounded() const { return std::isfinite(rule_.most_seconds); }

  const JoinAndChoose join_;
  const MeasureRule rule_;
  Mutex mutex_;
  std::map<std::vector<int>, LinkFit> fits_ ABSL_GUARDED_BY(mutex_);  // key: world ranks
  double spent_s_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace

std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group)> measured_groups(
    JoinAndChoose join, const MeasureRule& rule) {
  return [groups = std::make_shared<MeasuredGroups>(std::move(join), rule)](const Group& group) {
    return groups->join(group);
  };
}

}  // namespace tessera
