#include "runtime/comm/rounds/measured_groups.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"
#include "runtime/comm/rounds/link_fit.h"
#include "runtime/comm/rounds/timed_calls.h"

namespace tessera {
namespace {

constexpr std::size_t kFirstBytes = 512, kMostBytes = 2 << 20, kNextTimes = 8;
constexpr double kMostSeconds = 0.05;    // limit of a timed call
constexpr double kMostSecondsInAll = 2;  // limit of all calls together
constexpr int kTimes = 4;

/// The algorithm of a group's calls: a fixed one while the calls are timed, and the fit's choice afterwards.
class Choice {
 public:
  void use(Algorithm algorithm) {
    const MutexLock lock(mutex_);
    algorithm_ = algorithm;
  }
  void use(const LinkFit& fit) {
    const MutexLock lock(mutex_);
    by_fit_ = choose_by(fit);
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

/// Times every algorithm, for growing calls. The times are the same on all ranks, and so is the size of the last calls.
absl::StatusOr<std::vector<TimedCall>> time_network(Collectives& group, Choice& choice) {
  std::vector<TimedCall> timed;
  double spent = 0;
  for (std::size_t bytes = kFirstBytes; bytes <= kMostBytes; bytes *= kNextTimes) {
    std::vector<TimedCall> calls = calls_to_time(group.size(), bytes);
    // All ranks have the same times of the earlier calls, so they choose the same number. A call without any time would
    // seem to cost nothing.
    const auto times = [&](const TimedCall&) {
      double so_far = spent;
      for (const TimedCall& call : calls) so_far += call.median_s() * (kTimes + 1);
      return so_far > kMostSecondsInAll ? 1 : kTimes;
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
    if (slowest * kNextTimes > kMostSeconds || spent + of_size * kNextTimes > kMostSecondsInAll) break;
  }
  return timed;
}

/// Returns the fit of the group's first rank, since processors may differ in the last bits. It is collective.
absl::StatusOr<LinkFit> measure(Collectives& group, Choice& choice) {
  TESSERA_ASSIGN_OR_RETURN(const std::vector<TimedCall> timed, time_network(group, choice));
  LinkFit fit = fit_calls(group.size(), timed);
  TESSERA_RETURN_IF_ERROR(group.broadcast("fit", &fit, sizeof(fit), 0).wait());
  return fit;
}

class MeasuredGroups {
 public:
  explicit MeasuredGroups(JoinAndChoose join) : join_(std::move(join)) {}

  absl::StatusOr<std::shared_ptr<Collectives>> join(const Group& group) {
    if (const std::optional<LinkFit> known = fit_of(group.world_ranks)) return join_(group, choose_by(*known));
    const auto choice = std::make_shared<Choice>();
    TESSERA_ASSIGN_OR_RETURN(std::shared_ptr<Collectives> joined,
                             join_(group, [choice](Operation operation, int ranks, DType dtype, std::size_t bytes) {
                               return (*choice)(operation, ranks, dtype, bytes);
                             }));
    TESSERA_ASSIGN_OR_RETURN(const LinkFit fit, measure(*joined, *choice));
    choice->use(fit);
    {
      const MutexLock lock(mutex_);
      fits_.emplace(group.world_ranks, fit);
    }
    if (group.rank == 0) log_info(group.key() + ": measured: " + text_of(fit));
    return joined;
  }

 private:
  std::optional<LinkFit> fit_of(const std::vector<int>& world_ranks) {
    const MutexLock lock(mutex_);
    const auto known = fits_.find(world_ranks);
    return known == fits_.end() ? std::nullopt : std::optional(known->second);
  }

  const JoinAndChoose join_;
  Mutex mutex_;
  std::map<std::vector<int>, LinkFit> fits_ ABSL_GUARDED_BY(mutex_);  // key: world ranks
};

}  // namespace

std::function<absl::StatusOr<std::shared_ptr<Collectives>>(const Group& group)> measured_groups(JoinAndChoose join) {
  return
      [groups = std::make_shared<MeasuredGroups>(std::move(join))](const Group& group) { return groups->join(group); };
}

}  // namespace tessera
