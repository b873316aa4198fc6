#include "runtime/comm/rank_watch.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr int kMostOfRankZero = 64;  // number of ranks up to which all ranks watch rank 0: a port's queue holds this
                                     // many connections
constexpr int kMostTries = 600;      // limit of a rank's tries to find the next rank's port
constexpr auto kToReturn = 1s;       // time for this rank to return from its call after it learns that a rank is gone
// When the kernel finds a connection silent (NextRank), the outage has lasted at least this many seconds.
constexpr double kSilentByThen = 6;

}  // namespace

std::string key_of_report(int rank) { return "waits/" + std::to_string(rank); }

RankWatch::RankWatch(int rank, int world_size, const std::string& address, OwnConnection& store) : store_(store) {
  if (world_size == 1 || address.empty()) return;
  next_.rank = std::make_unique<NextRank>(rank, world_size, address);
  if (rank != 0 && next_.rank->rank() != 0 && world_size <= kMostOfRankZero)
    first_.rank = std::make_unique<NextRank>(/*watched=*/0);
}

void RankWatch::bear_outages(double seconds) {
  const auto longer = std::chrono::milliseconds(static_cast<std::int64_t>(1000 * (seconds - kSilentByThen)));
  silence_ = std::max<std::chrono::milliseconds>(longer, kForLastCalls);
}

void RankWatch::look() {
  if (next_.rank) next_.rank->take_watchers();
  look_after_next();
  look_after_first();
}

void RankWatch::look_after_next() {
  if (!next_.rank || next_.is_done || !store_.connect()) return;
  NextRank& rank = *next_.rank;
  if (!rank.is_watched()) return find(next_);
  if (!rank.has_ended()) {
    host_has_vanished_ = false;  // the host answered again before other ranks were told
    return next_.ended.reset();
  }
  if (!next_.ended) next_.ended = Clock::now();
  const auto since = Clock::now() - *next_.ended;
  if (rank.has_ended_well()) {  // a report that is too long never arrives as a whole
    if (hear_end(rank) || since >= kToReturn) pass_over_next();
    return;
  }
  // If a host has vanished, this rank does not wait for the other ranks of that host.
  if (rank.is_connected() && since < (rank.is_silent() ? silence_ : std::chrono::milliseconds(kForLastCalls))) return;
  host_has_vanished_ = rank.is_silent();
  const bool is_told = store_.ask(
      [gone = rank.rank()](KeyValueStore& store) { store.append(kAnyGoneRank, std::to_string(gone)).IgnoreError(); });
  if (!is_told) return;
  next_.is_done = !host_has_vanished_ || !rank.go_on();
  next_.ended.reset();
  next_.tries = 0;
}

// If the next rank is rank 0, the watch stays on it: has_first_ended_well asks whether rank 0 has ended, and the store
// mostly ends with rank 0.
void RankWatch::pass_over_next() {
  next_.has_gone_on = true;
  next_.is_done = next_.rank->rank() == 0 || !next_.rank->go_on();
  next_.ended.reset();
  next_.tries = 0;
}

void RankWatch::look_after_first() {
  if (!first_.rank) return;
  if (!first_.is_done && store_.connect() && !first_.rank->is_watched()) find(first_);
  hear_end(*first_.rank);
}

bool RankWatch::hear_end(const NextRank& rank) {
  if (ended_.contains(rank.rank())) return true;
  const std::string text = rank.end_report();
  if (text.empty()) return false;
  std::optional<WaitReport> report = WaitReport::from_text(text);
  if (!report) return false;
  report->rank = rank.rank();
  ended_[rank.rank()] = *std::move(report);
  store_.ask([text, key = key_of_report(rank.rank())](KeyValueStore& store) {
    store.set(key, text).IgnoreError();  // this fails if rank 0 has ended, and other ranks watch rank 0 too
  });
  return true;
}

void RankWatch::find(Watched& watched) {
  const auto places = std::make_shared<NextRank::Places>(watched.rank->places());
  const bool is_answered = store_.ask([places](KeyValueStore& store) { places->exchange(store); });
  const bool is_known = is_answered && !places->next.empty();
  if (is_known) watched.rank->connect(places->next);
  // A host that does not answer may have an outage. Each try to connect to such a host takes a second, so the try
  // counts more.
  watched.tries += is_known ? kMostTries / 10 : 1;
  const bool may_come = (!is_known || watched.rank->is_silent()) && watched.tries <= kMostTries;
  watched.is_done = !watched.rank->is_watched() && !may_come;
  // The rank after one that has ended well may have ended well itself by now.
  if (is_known && watched.is_done && watched.has_gone_on && !watched.rank->is_silent()) pass_over_next();
}

bool RankWatch::has_first_ended_well() const {
  const Watched& first = first_.rank ? first_ : next_;
  return first.rank && first.rank->rank() == 0 && first.rank->has_ended_well();
}

bool RankWatch::has_host_vanished() { return host_has_vanished_ || has_first_vanished(); }

bool RankWatch::has_first_vanished() {
  if (!first_.rank || !first_.rank->is_watched()) return false;
  const bool is_silent = first_.rank->has_ended() && first_.rank->is_silent();
  if (!is_silent) first_.ended.reset();
  if (is_silent && !first_.ended) first_.ended = Clock::now();
  return is_silent && Clock::now() - *first_.ended >= silence_;
}

absl::StatusOr<bool> RankWatch::has_key(const std::string& key) {
  if (key.starts_with(std::string(kAnyGoneRank) + "/")) {
    const auto gone = gone_since_.find(key);
    return gone != gone_since_.end() && Clock::now() - gone->second >= kToReturn;
  }
  const auto found = std::make_shared<absl::StatusOr<bool>>(false);
  const auto gone = std::make_shared<std::vector<std::string>>();
  const auto question = [key, found, gone](KeyValueStore& store) {
    if (key != kAnyGoneRank) {
      *found = store.has(key);
      return;
    }
    absl::StatusOr<std::vector<std::string>> listed = store.listed(key);
    *found = listed.ok() ? absl::StatusOr<bool>(!listed->empty()) : listed.status();
    if (listed.ok()) *gone = *std::move(listed);
  };
  // The groups' own connection may be in use by the call in which the program waits.
  if (!store_.ask(question)) return has_host_vanished();
  for (const std::string& rank : *gone) gone_since_.try_emplace(std::string(kAnyGoneRank) + "/" + rank, Clock::now());
  if (found->ok()) return *found;
  if (store_.fall_back()) return false;      // that connection has ended, but the store may still answer
  if (has_first_ended_well()) return false;  // rank 0 has done its part of the calls that other ranks are still in
  if (!store_ended_) store_ended_ = Clock::now();
  return Clock::now() - *store_ended_ < kForLastCalls ? absl::StatusOr<bool>(false) : *found;
}

void RankWatch::end_wait(bool also_of_first) {
  store_ended_.reset();
  if (also_of_first) first_.ended.reset();
}

void RankWatch::end_silence() {
  if (first_.rank && first_.rank->is_watched() && !first_.rank->has_ended()) first_.ended.reset();
}

}  // namespace tessera
