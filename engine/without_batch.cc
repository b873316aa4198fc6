// A microbatch of a rank that has no batch (Engine::backward_nothing).

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "engine/engine_checkpoints.h"
#include "engine/engine_state.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {
namespace {

/// Does what ranks with a batch do together, event by event. A unit stays in use until the next one is, or until something else happens.
class Follower {
 public:
  explicit Follower(EngineCheckpoints::State& s) : s_(s) {}

  /// `ends`: of a kEnd, that it is the microbatch's.
  void take(int event, bool ends) {
    const bool is_beside = std::exchange(comes_beside_, event == RoundLog::kBesides);
    if (event == RoundLog::kBesides) return;
    if (!is_beside) let_go();
    if (event >= 0 && s_.gathers_with_others()) {
      Unit& unit = *s_.units[static_cast<std::size_t>(event)];
      s_.residency->use(unit);
      in_use_.push_back(&unit);
    } else if (event == RoundLog::kBackward) {
      s_.begin_backward(/*weight=*/0);
    } else if (event == RoundLog::kReduction) {
      s_.reducer->reduce_nothing();
    } else if (event == RoundLog::kEnd || event == RoundLog::kEndOfLoss) {
      s_.end_round(ends, /*has_batch=*/false);
    }
  }

 private:
  void let_go() {
    for (Unit* unit : in_use_) s_.residency->unpin(*unit);
    in_use_.clear();
  }

  EngineCheckpoints::State& s_;
  std::vector<Unit*> in_use_;
  bool comes_beside_ = false;
};

}  // namespace

void Engine::State::run_nothing() {
  const Span span("backward");
  static constexpr int kNoGathers[] = {RoundLog::kBackward, RoundLog::kEnd};
  rounds.forget();  // what a program has done beside microbatches
  Follower follower(*this);
  if (meeting) {
    for (int event = RoundLog::kBesides; event != RoundLog::kEnd;) {
      event = meeting->next();
      follower.take(event, /*ends=*/event == RoundLog::kEnd);
    }
    meeting.reset();
    rounds.end_microbatch();
  } else {
    const std::span<const int> known = rounds.last().empty() ? std::span<const int>(kNoGathers) : rounds.last();
    const std::vector<int> events(known.begin(), known.end());
    const auto last_end = std::find(events.rbegin(), events.rend(), RoundLog::kEnd);
    for (auto event = events.begin(); event != events.end(); ++event)
      follower.take(*event, /*ends=*/event + 1 == last_end.base());
    rounds.forget();
  }
  ++microbatch;
  if (use_times) use_times->mark(UseTimes::Event::kBackwardEnd);
}

bool Engine::State::any_rank_has_batch(bool own) {
  enum : char { kOut, kOutAndNew, kHasBatch };  // new: has seen no microbatch
  const bool is_new = rounds.last().empty() && gathers_with_others();
  const char mine = own ? kHasBatch : is_new ? kOutAndNew : kOut;
  std::vector<char> all(static_cast<std::size_t>(whole.control->size()));
  throw_if_error(whole.control->all_gather("batches left", &mine, all.data(), 1).wait());
  const auto leader = std::ranges::find(all, char{kHasBatch});
  if (leader == all.end()) return false;
  if (std::ranges::find(all, char{kOutAndNew}) == all.end()) return true;
  RoundMeeting meets(whole.control, static_cast<int>(leader - all.begin()));
  if (own) {
    rounds.forget();
    rounds.tell([meets](int event) mutable { meets.meet(event); });
  } else {
    meeting.emplace(meets);
  }
  return true;
}

}  // namespace tessera
