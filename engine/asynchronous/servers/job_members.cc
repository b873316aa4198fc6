#include "engine/asynchronous/servers/job_members.h"

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::chrono::milliseconds kMembersPause{200};

}  // namespace

absl::Status worker_gone() {
  return make_error(ExitCode::kPeerLost, "the worker has gone. [T0964] hint: what it printed last says why");
}

absl::StatusOr<std::optional<JobMembers::Place>> JobMembers::join(int wanted) {
  const MutexLock lock(mutex_);
  Place place{wanted, /*gives_values=*/false, /*steps=*/0};
  if (is_elastic() && wanted == kAnyNumber) {
    if (!has_values_ && giver_) return std::optional<Place>();
    place = {next_number_++, !has_values_, slowest()};
    if (place.gives_values) giver_ = place.number;
  }
  if (place.number < 0 || place.number >= (is_elastic() ? kMostWorkers : ranks_))
    return make_error(ExitCode::kUsage, "the run has no rank " + std::to_string(place.number) +
                                            ". [T0966] hint: start all ranks of a run alike");
  if (is_elastic() && members_.contains(place.number)) return std::optional<Place>();
  if (members_.contains(place.number))
    return make_error(ExitCode::kUsage, "rank " + std::to_string(place.number) +
                                            " is there already. [T0967] hint: give each process a rank of its own");
  expected_.erase(place.number);
  members_[place.number].computed = members_[place.number].pushed = place.steps;
  return std::optional(place);
}

void JobMembers::expect_back(std::chrono::milliseconds limit) {
  const MutexLock lock(mutex_);
  for (int rank = 0; rank < ranks_; ++rank) expected_.insert(rank);
  expected_until_ = Clock::now() + limit;
}

void JobMembers::leave(int number) {
  const MutexLock lock(mutex_);
  const auto found = members_.find(number);
  if (found == members_.end()) return;
  const std::deque<std::int64_t>& dealt = found->second.dealt;
  if (!dealt.empty())
    log_info("worker " + std::to_string(number) + " has left " + std::to_string(dealt.size()) +
             " of its steps unmade, from number " + std::to_string(dealt.front()) + " on; they are dealt again");
  returned_.insert(dealt.begin(), dealt.end());
  if (giver_ == number) giver_.reset();
  if (holder_ == number) holder_.reset();
  members_.erase(found);
  changed_.notify_all();
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
  for (const auto& [number, member] : members_)
    if (!member.rests) least = std::min(least.value_or(member.pushed), member.pushed);
  return least.value_or(0);
}

void JobMembers::note(int number, std::int64_t computed, std::int64_t pushed) {
  const MutexLock lock(mutex_);
  Member& member = members_[number];
  if (pushed > member.pushed && !member.dealt.empty()) {
    member.dealt.pop_front();
    ++made_;
  }
  member.computed = computed;
  member.pushed = pushed;
  changed_.notify_all();
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
    int missing = -1;
    if (!expected_.empty() && Clock::now() < expected_until_) missing = *expected_.begin();
    for (const auto& [q, member] : members_)
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
  changed_.notify_all();
  return absl::OkStatus();
}

absl::StatusOr<JobMembers::Deal> JobMembers::deal(int number, std::int64_t steps) {
  const MutexLock lock(mutex_);
  if (steps < 1)
    return make_error(ExitCode::kUsage,
                      "a run of " + std::to_string(steps) +
                          " steps has none to deal. [T0997] hint: ask for a step of 1 or more in all");
  if (steps_ == 0) steps_ = steps;
  if (steps != steps_)
    return make_error(ExitCode::kUsage, "this worker makes " + std::to_string(steps) +
                                            " steps together with the others, and they make " + std::to_string(steps_) +
                                            ". [T0998] hint: start all workers of a run with the same number of steps");
  Member& member = members_[number];
  Deal deal;
  if (!returned_.empty()) {
    deal.step = *returned_.begin();
    returned_.erase(returned_.begin());
  } else if (next_step_ < steps_) {
    deal.step = next_step_++;
  } else if (!member.dealt.empty()) {
    deal.kind = Deal::Kind::kOwnFirst;
    return deal;
  } else {
    member.rests = true;
    changed_.notify_all();
    deal.kind = made_ < steps_ ? Deal::Kind::kAskAgain : Deal::Kind::kOver;
    if (deal.kind == Deal::Kind::kAskAgain) return deal;
    if (!finisher_ || !members_.contains(*finisher_)) finisher_ = number;
    deal.finishes = finisher_ == number;
    return deal;
  }
  if (member.rests) {
    member.computed = member.pushed = std::max(member.pushed, slowest());
    member.rests = false;
  }
  member.dealt.push_back(deal.step);
  deal.counted = member.pushed;
  return deal;
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
