#include "planner/modes/backup_clock.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <queue>
#include <utility>

#include "sharding/layout/plan/microbatch_deal.h"

namespace tessera {
namespace {

/// A moment at which a rank has ended the forward or the backward of a microbatch.
struct BackupEvent {
  double at_s = 0;
  int rank = 0;
  bool ends_forward = false;
  friend bool operator>(const BackupEvent& a, const BackupEvent& b) {
    return a.at_s != b.at_s ? a.at_s > b.at_s : a.rank > b.rank;
  }
};

/// The step under way. Its functions have the names of the functions of BackupClaims, which chooses microbatches in the
/// same way.
class BackupPlay {
 public:
  BackupPlay(const MicrobatchOrder& order, std::span<const BackupRank> ranks)
      : order_(order),
        speeds_(ranks),
        ranks_(ranks.size()),
        ends_(static_cast<std::size_t>(order.all()), 0),
        begun_(static_cast<std::size_t>(order.all()), 0) {
    step_.ends_s.resize(ranks.size(), 0.0);
  }

  BackupStep play() {
    for (int rank = 0; rank < order_.ranks; ++rank) {
      of(rank).next = order_.run_of(rank).begin;
      begin(rank, speeds_[static_cast<std::size_t>(rank)].first_s);
    }
    while (!events_.empty()) {
      const BackupEvent event = events_.top();
      events_.pop();
      event.ends_forward ? end_forward(event) : end(event);
    }
    step_.twice = std::ranges::count_if(begun_, [](int ranks) { return ranks > 1; });
    return std::move(step_);
  }

 private:
  struct Rank {
    std::optional<std::int64_t> next;
    bool helps = false;  ///< whether the next microbatch is another rank's
    RunProgress progress;
    std::int64_t claims = 0, computed = 0;
    /// number of claimed microbatches of this rank's run when the rank last completed one of the run
    std::int64_t claimed = 0;
  };

  Rank& of(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

  void begin(int rank, double now_s) {
    const std::optional<std::int64_t> next = of(rank).next;
    step_.ends_s[static_cast<std::size_t>(rank)] = now_s;
    if (!next) return;
    ++begun_[static_cast<std::size_t>(*next)];
    events_.push({now_s + speeds_[static_cast<std::size_t>(rank)].forward_s, rank, /*ends_forward=*/true});
  }

  void end_forward(const BackupEvent& event) {
    Rank& rank = of(event.rank);
    if (!is_made(*rank.next)) {
      events_.push({event.at_s + speeds_[static_cast<std::size_t>(event.rank)].backward_s, event.rank, false});
      return;
    }
    ++rank.computed;
    choose(event.rank, /*run_goes_on=*/false);
    begin(event.rank, event.at_s);
  }

  void end(const BackupEvent& event) {
    Rank& rank = of(event.rank);
    const TreeBlock run = order_.run_of(event.rank);
    const std::int64_t ended = *rank.next;
    bool counts = true;
    ++rank.computed;
    if (rank.helps) {
      counts = make(ended);
      step_.made_again += counts ? 1 : 0;
    } else {
      ++rank.progress.ended;
      rank.claimed = rank.progress.claimed;
      if (ended >= run.end - rank.claimed) counts = make(ended);
    }
    choose(event.rank, /*run_goes_on=*/counts && !rank.helps);
    begin(event.rank, event.at_s);
  }

  bool is_made(std::int64_t microbatch) const { return ends_[static_cast<std::size_t>(microbatch)] > 0; }
  bool make(std::int64_t microbatch) { return ++ends_[static_cast<std::size_t>(microbatch)] == 1; }

  void choose(int rank, bool run_goes_on) {
    Rank& own = of(rank);
    const std::int64_t following = *own.next + 1, end = order_.run_of(rank).end;
    if (run_goes_on && following < end && (following < end - own.claimed || !is_made(following))) {
      own.next = following;
      return;
    }
    own.next = claim(rank);
    own.helps = own.next.has_value();
  }

  std::optional<std::int64_t> claim(int rank) {
    Rank& own = of(rank);
    while (own.claims < order_.backups) {
      const auto slow = rank_to_help(order_, rank, own.computed, [this](int other) { return of(other).progress; });
      if (!slow) return std::nullopt;
      RunProgress& now = of(*slow).progress;
      const TreeBlock run = order_.run_of(*slow);
      ++now.claimed;
      if (run.end - now.claimed < run.begin + now.ended) continue;
      ++own.claims;
      return run.end - now.claimed;
    }
    return std::nullopt;
  }

  const MicrobatchOrder& order_;
  const std::span<const BackupRank> speeds_;
  std::vector<Rank> ranks_;
  std::vector<int> ends_, begun_;  ///< [microbatch]: number of ranks that have completed it, and that have begun it
  std::priority_queue<BackupEvent, std::vector<BackupEvent>, std::greater<>> events_;
  BackupStep step_;
};

}  // namespace

BackupStep play_backups(const MicrobatchOrder& order, std::span<const BackupRank> ranks) {
  return BackupPlay(order, ranks).play();
}

}  // namespace tessera
