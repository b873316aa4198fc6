// This file runs a microbatch on a rank that has no batch (Engine::backward_nothing).

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "engine/training/training.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// Repeats the collectives of ranks with a batch, event by event. A unit stays in use until the next event, unless that
/// event says that further units are used at the same time.
class Follower {
 public:
  explicit Follower(Training& training) : training_(training) {}

  /// Repeats one event. `ends`: whether the microbatch ends with this event.
  void take(int event, bool ends) {
    const bool is_beside = std::exchange(comes_beside_, event == RoundLog::kBesides);
    if (event == RoundLog::kBesides) return;
    if (!is_beside) let_go();
    if (event >= 0 && training_.gathers_with_others()) {
      Unit& unit = *training_.units[static_cast<std::size_t>(event)];
      training_.gathering.residency->use(unit);
      in_use_.push_back(&unit);
    } else if (event == RoundLog::kBackward) {
      training_.begin_backward({.weight = 0});
    } else if (event == RoundLog::kReduction) {
      training_.gradients.reducer->reduce_nothing();
    } else if (event == RoundLog::kEnd || event == RoundLog::kEndOfLoss) {
      training_.end_round(ends, /*has_batch=*/false);
    }
  }

 private:
  void let_go() {
    for (Unit* unit : in_use_) training_.gathering.residency->unpin(*unit);
    in_use_.clear();
  }

  Training& training_;
  std::vector<Unit*> in_use_;
  bool comes_beside_ = false;
};

}  // namespace

void Training::run_nothing() {
  const Span span("backward");
  static constexpr int kNoGathers[] = {RoundLog::kBackward, RoundLog::kEnd};
  window.rounds.forget();  // forgets events that the program caused outside of microbatches
  Follower follower(*this);
  if (window.meeting) {
    for (int event = RoundLog::kBesides; event != RoundLog::kEnd;) {
      event = window.meeting->next();
      follower.take(event, /*ends=*/event == RoundLog::kEnd);
    }
    window.meeting.reset();
    window.rounds.end_microbatch();
  } else {
    const std::span<const int> known =
        window.rounds.last().empty() ? std::span<const int>(kNoGathers) : window.rounds.last();
    const std::vector<int> events(known.begin(), known.end());
    const auto last_end = std::find(events.rbegin(), events.rend(), RoundLog::kEnd);
    for (auto event = events.begin(); event != events.end(); ++event)
      follower.take(*event, /*ends=*/event + 1 == last_end.base());
    window.rounds.forget();
  }
  ++window.microbatch;
  seed_microbatch();
  times.mark(UseTimes::Event::kBackwardEnd);
}

bool Training::any_rank_has_batch(bool own) {
  expect(!dealer,
         "uneven under \"deal\" by speed: ranks meet before each microbatch there, and they have different numbers of "
         "microbatches. [T0910] hint: take data that deals them (TokenBatches, RankSampler), or set \"deal\": {\"by\": "
         "\"even\"}");
  enum : char { kOut, kOutAndNew, kHasBatch };  // Out: no batch left; New: the rank has seen no microbatch yet
  const bool is_new = window.rounds.last().empty() && gathers_with_others();
  const char mine = own ? kHasBatch : is_new ? kOutAndNew : kOut;
  std::vector<char> all(static_cast<std::size_t>(job.axes.control->size()));
  throw_if_error(job.axes.control->all_gather("batches left", &mine, all.data(), 1).wait());
  const auto leader = std::ranges::find(all, char{kHasBatch});
  if (leader == all.end()) return false;
  if (std::ranges::find(all, char{kOutAndNew}) == all.end()) return true;
  RoundMeeting meets(job.axes.control, static_cast<int>(leader - all.begin()));
  if (own) {
    window.rounds.forget();
    window.rounds.tell([meets](int event) mutable { meets.meet(event); });
  } else {
    window.meeting.emplace(meets);
  }
  return true;
}

}  // namespace tessera
