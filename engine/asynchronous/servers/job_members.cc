#include "engine/asynchronous/servers/job_members.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {

// This file counts workers, deals steps and holds back pushes, all under one mutex.
//
// When workers or steps change, `note_change` counts the change and wakes all waits. The end of a push or of a save
// wakes the waits and is not counted. A wait also looks again after kMembersPause, since a connection may end without a
// notification. Workers that are present are in `members_`. When a server is started again, the workers of the run are
// in `away_` until they join again, or until `give_up_late` gives them up. The steps that a worker has not made when it
// leaves are added to `returned_`, and `deal` takes steps from there first. `image` returns the workers and the steps
// as numbers, and `restore` reads such numbers.

namespace {

constexpr std::chrono::milliseconds kMembersPause{200};

}  // namespace

absl::Status worker_gone() {
  return make_error(ExitCode::kPeerLost, "the worker has gone. [T0964] hint: what it printed last says why");
}

absl::StatusOr<std::optional<JobMembers::Place>> JobMembers::join(int wanted, bool returns) {
  const MutexLock lock(mutex_);
  give_up_late();
  Place place{wanted, /*gives_values=*/false};
  if (is_elastic() && wanted == kAnyNumber) {
    if (!has_values_ && giver_) return std::optional<Place>();
    place = {next_number_++, !has_values_};
    if (place.gives_values) giver_ = place.number;
  }
  if (place.number < 0 || place.number >= (is_elastic() ? kMostWorkers : ranks_))
    return make_error(ExitCode::kUsage, "the run has no rank " + std::to_string(place.number) +
                                            ". [T0966] hint: start all ranks of a run alike");
  if (is_elastic() && members_.contains(place.number)) return std::optional<Place>();
  if (members_.contains(place.number))
    return make_error(ExitCode::kUsage, "rank " + std::to_string(place.number) +
                                            " is there already. [T0967] hint: give each process a rank of its own");
  // Only server 0 of an elastic run gives numbers, and knows which steps a worker holds.
  if (is_elastic() && returns && next_number_ > 0 && !away_.contains(place.number))
    return make_error(ExitCode::kUnavailable,
                      "worker " + std::to_string(place.number) +
                          " was away for too long, and its steps are dealt again. [T1050] hint: start "
                          "it anew");
  Member& member = members_[place.number];
  if (const auto found = away_.find(place.number); found != away_.end()) {
    member = std::move(found->second);
    away_.erase(found);
  } else {
    member.rests = is_elastic();
  }
  note_change();
  return std::optional(place);
}

void JobMembers::expect_back(std::chrono::milliseconds limit) {
  const MutexLock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) away_[rank] = Member();
  away_until_ = Clock::now() + limit;
}

void JobMembers::leave(int number) {
  const MutexLock lock(mutex_);
  const auto found = members_.find(number);
  if (found == members_.end()) return;
  give_up(number, found->second);
  members_.erase(found);
  note_change();
}

void JobMembers::give_up(int number, const Member& member) {
  const std::deque<std::int64_t>& dealt = member.dealt;
  if (!dealt.empty())
    log_info("worker " + std::to_string(number) + " has left " + std::to_string(dealt.size()) +
             " of its steps unmade, from number " + std::to_string(dealt.front()) + " on; they are dealt again");
  returned_.insert(dealt.begin(), dealt.end());
  if (giver_ == number) giver_.reset();
  if (holder_ == number) holder_.reset();
}

void JobMembers::give_up_late() {
  if (away_.empty() || Clock::now() < away_until_) return;
  for (const auto& [number, member] : away_) give_up(number, member);
  away_.clear();
  note_change();
}

void JobMembers::note_change() {
  ++changes_;
  changed_.notify_all();
}

std::int64_t JobMembers::changes() const {
  const MutexLock lock(mutex_);
  return changes_;
}

/// The image has ten numbers, and the last of them is the number of steps to deal again. These steps follow. Then each
/// worker has six numbers, and the last of them is the number of steps that the worker holds. The worker's steps
/// follow.
std::pair<std::vector<std::int64_t>, std::int64_t> JobMembers::image() const {
  const MutexLock lock(mutex_);
  std::vector<std::int64_t> image = {steps_,
                                     next_step_,
                                     made_,
                                     next_number_,
                                     has_values_ ? 1 : 0,
                                     giver_.value_or(kAnyNumber),
                                     finisher_.value_or(kAnyNumber),
                                     are_written_ ? 1 : 0,
                                     data_order_};
  image.push_back(static_cast<std::int64_t>(returned_.size()));
  image.insert(image.end(), returned_.begin(), returned_.end());
  for (const auto* const members : {&members_, &away_}) {
    for (const auto& [number, member] : *members) {
      const auto held = static_cast<std::int64_t>(member.dealt.size());
      image.insert(image.end(), {number, member.computed, member.pushed, member.taken, member.rests ? 1 : 0, held});
      image.insert(image.end(), member.dealt.begin(), member.dealt.end());
    }
  }
  return {std::move(image), changes_};
}

bool JobMembers::restore(std::span<const std::int64_t> image) {
  const MutexLock lock(mutex_);
  const auto take = [&](std::size_t count) {
    const auto taken = image.first(std::min(count, image.size()));
    image = image.subspan(taken.size());
    return taken;
  };
  const auto numbers = take(10);
  if (numbers.size() < 10 || numbers[9] < 0) return false;
  steps_ = numbers[0];
  next_step_ = numbers[1];
  made_ = numbers[2];
  next_number_ = static_cast<int>(numbers[3]);
  has_values_ = numbers[4] != 0;
  if (numbers[5] != kAnyNumber) giver_ = static_cast<int>(numbers[5]);
  if (numbers[6] != kAnyNumber) finisher_ = static_cast<int>(numbers[6]);
  are_written_ = numbers[7] != 0;
  data_order_ = numbers[8];
  const auto returned = take(static_cast<std::size_t>(numbers[9]));
  returned_.insert(returned.begin(), returned.end());
  while (!image.empty()) {
    const auto worker = take(6);
    if (worker.size() < 6 || worker[5] < 0) return false;
    const auto dealt = take(static_cast<std::size_t>(worker[5]));
    away_[static_cast<int>(worker[0])] = {.computed = worker[1],
                                          .pushed = worker[2],
                                          .taken = worker[3],
                                          .dealt = {dealt.begin(), dealt.end()},
                                          .rests = worker[4] != 0};
    if (static_cast<std::int64_t>(dealt.size()) != worker[5]) return false;
  }
  return static_cast<std::int64_t>(returned.size()) == numbers[9];
}

bool JobMembers::lasts() const {
  const MutexLock lock(mutex_);
  return has_values_;
}

bool JobMembers::is_empty() const {
  const MutexLock lock(mutex_);
  return members_.empty();
}

/// Returns the number of steps that the slowest worker has pushed, among the workers that have steps to make; 0 if
/// there is no such worker.
std::int64_t JobMembers::slowest() const {
  std::optional<std::int64_t> least;
  for (const auto* const members : {&members_, &away_})
    for (const auto& [number, member] : *members)
      if (!member.rests) least = std::min(least.value_or(member.pushed), member.pushed);
  return least.value_or(0);
}

void JobMembers::note(int number, std::int64_t computed, std::int64_t pushed) {
  const MutexLock lock(mutex_);
  Member& member = members_[number];
  // Several steps are new in `pushed` if the worker has made steps while the server was away.
  for (std::int64_t made = std::max(pushed, member.pushed) - member.pushed; made > 0 && !member.dealt.empty(); --made) {
    member.dealt.pop_front();
    ++made_;
  }
  // A worker that comes back repeats its last message. The numbers in this message may be smaller than the count that
  // begin_step gave the worker.
  member.computed = std::max(member.computed, computed);
  member.pushed = std::max(member.pushed, pushed);
  note_change();
}

JobMembers::Begun JobMembers::begin_step(int number) {
  const MutexLock lock(mutex_);
  Member& member = members_[number];
  const bool has_rested = member.rests;
  if (has_rested) {
    member.computed = member.pushed = std::max(member.pushed, slowest());
    member.rests = false;
    note_change();
  }
  return {member.pushed, has_rested};
}

absl::Status JobMembers::wait_on(Clock::time_point deadline, const IsGone& is_gone) {
  if (is_gone()) return worker_gone();
  if (Clock::now() > deadline)
    return make_error(
        ExitCode::kPeerLost,
        "timed out waiting for a worker that saves or pushes (comm.timeout_s sets the limit). [T0995] hint: look "
        "for what stops the other workers");
  changed_.wait_until(mutex_, Clock::now() + kMembersPause);
  return absl::OkStatus();
}

absl::Status JobMembers::await(const std::function<bool(int number, const Member& member)>& has_come, int number,
                               const IsGone& is_gone) {
  const Clock::time_point deadline = Clock::now() + limit_;
  const MutexLock lock(mutex_);
  for (;;) {
    give_up_late();
    int missing = -1;
    for (const auto* const members : {&away_, &members_})
      for (const auto& [q, member] : *members)
        if (missing < 0 && q != number && !member.rests && !has_come(q, member)) missing = q;
    if (missing < 0) return absl::OkStatus();
    if (is_gone()) return worker_gone();
    if (Clock::now() > deadline)
      return make_error(ExitCode::kPeerLost,
                        "timed out waiting for rank " + std::to_string(missing) +
                            " (comm.timeout_s sets the limit). [T0968] hint: look for what stops that "
                            "rank, or raise sync.max_staleness");
    changed_.wait_until(mutex_, Clock::now() + kMembersPause);
  }
}

absl::Status JobMembers::begin(int number) {
  const MutexLock lock(mutex_);
  if (giver_.value_or(number) != number)
    return make_error(ExitCode::kUsage,
                      "worker " + std::to_string(number) +
                          " was not to give the first values. [T0996] hint: run `tessera serve` of the "
                          "workers' own version");
  has_values_ = true;
  note_change();
  return absl::OkStatus();
}

absl::StatusOr<JobMembers::Deal> JobMembers::deal(int number, std::int64_t steps, std::int64_t taken,
                                                  std::int64_t data_order) {
  const MutexLock lock(mutex_);
  give_up_late();
  if (steps < 1)
    return make_error(ExitCode::kUsage,
                      "a run of " + std::to_string(steps) +
                          " steps has none to deal. [T0997] hint: ask for a step of 1 or more in all");
  if (steps_ == 0) {
    steps_ = steps;
    data_order_ = data_order;
  }
  if (steps != steps_)
    return make_error(ExitCode::kUsage, "this worker makes " + std::to_string(steps) +
                                            " steps together with the others, and they make " + std::to_string(steps_) +
                                            ". [T0998] hint: start all workers of a run with the same number of steps");
  if (data_order != data_order_)
    return make_error(
        ExitCode::kUsage,
        "this worker takes other data than the others, or takes them in another order. [T1065] hint: start all "
        "workers of a run with the same data, sequence length, batch, gradient_accumulation and seed");
  Member& member = members_[number];
  Deal deal;
  if (taken < member.taken && !member.dealt.empty()) {
    deal.step = member.dealt.back();
    return deal;
  }
  if (!returned_.empty()) {
    deal.step = *returned_.begin();
    returned_.erase(returned_.begin());
  } else if (next_step_ < steps_) {
    deal.step = next_step_++;
  } else if (!member.dealt.empty()) {
    deal.kind = Deal::Kind::kOwnFirst;
    return deal;
  } else {
    if (!std::exchange(member.rests, true)) note_change();
    // If the worker that writes the results is away and does not come back, the worker that asks writes them.
    const bool waits_for_finisher = finisher_ && !are_written_ && away_.contains(*finisher_);
    deal.kind = made_ < steps_ || waits_for_finisher ? Deal::Kind::kAskAgain : Deal::Kind::kOver;
    if (deal.kind == Deal::Kind::kAskAgain || are_written_) return deal;
    if (!finisher_ || !members_.contains(*finisher_)) {
      finisher_ = number;
      note_change();
    }
    deal.finishes = finisher_ == number;
    return deal;
  }
  member.dealt.push_back(deal.step);
  ++member.taken;
  note_change();
  return deal;
}

absl::Status JobMembers::end_results(int number) {
  const MutexLock lock(mutex_);
  if (finisher_ != number)
    return make_error(ExitCode::kUsage,
                      "worker " + std::to_string(number) +
                          " was not to write the results. [T1051] hint: ask Engine::writes_results first");
  are_written_ = true;
  note_change();
  return absl::OkStatus();
}

absl::Status JobMembers::begin_push(int number, const IsGone& is_gone) {
  if (!is_elastic()) return absl::OkStatus();
  const Clock::time_point deadline = Clock::now() + limit_;
  const MutexLock lock(mutex_);
  while (holder_ && *holder_ != number) TESSERA_RETURN_IF_ERROR(wait_on(deadline, is_gone));
  ++pushing_;
  return absl::OkStatus();
}

void JobMembers::end_push() {
  if (!is_elastic()) return;
  const MutexLock lock(mutex_);
  --pushing_;
  changed_.notify_all();
}

absl::Status JobMembers::hold(int number, const IsGone& is_gone) {
  const Clock::time_point deadline = Clock::now() + limit_;
  const MutexLock lock(mutex_);
  while (holder_ && *holder_ != number) TESSERA_RETURN_IF_ERROR(wait_on(deadline, is_gone));
  holder_ = number;
  absl::Status status;
  while (status.ok() && pushing_ > 0) status = wait_on(deadline, is_gone);
  if (!status.ok()) holder_.reset();
  return status;
}

void JobMembers::release(int number) {
  const MutexLock lock(mutex_);
  if (holder_ == number) holder_.reset();
  changed_.notify_all();
}

}  // namespace tessera
