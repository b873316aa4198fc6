#include "runtime/comm/shared/peers.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/comm/shared/futex.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kSlice{50};

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void ring(GroupBlock& group, bool between_processes) {
  group.bell.fetch_add(1);
  futex_wake(group.bell, between_processes);
}

void raise_alarm(GroupBlock& group, bool between_processes) {
  group.alarms.fetch_add(1);
  ring(group, between_processes);
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", value);
  return text;
}

CallSignature latest_call(const RankBlock& block) {
  const std::uint32_t current = block.current.load();
  const std::uint32_t slot = current & 0xffff;
  return static_cast<Lane>(current >> 16) == Lane::kStarted
             ? block.started.calls[slot % RankBlock::kReductionSlots].load()
             : block.blocking.calls[slot % RankBlock::kCallSlots].load();
}

}  // namespace

void mark_failed(GroupBlock& group, RankBlock& rank, const absl::Status& reason, bool between_processes) {
  RankState expected = RankState::kRunning;
  if (!rank.state.compare_exchange_strong(expected, RankState::kFailing)) return;
  group.doubt.store(1);
  group.failed.store(1);
  rank.exit_code = static_cast<std::uint32_t>(exit_code_of(reason));
  const std::size_t length = std::min(reason.message().size(), RankBlock::kMessageBytes - 1);
  std::copy_n(reason.message().data(), length, rank.message);
  rank.message[length] = 0;
  rank.state.store(RankState::kFailed);
  raise_alarm(group, between_processes);
}

void mark_left(GroupBlock& group, RankBlock& rank, bool between_processes) {
  RankState expected = RankState::kRunning;
  if (rank.state.compare_exchange_strong(expected, RankState::kLeft)) raise_alarm(group, between_processes);
}

Peers::Peers(const Group& group, SharedSpace& space)
    : group_(group), space_(space), group_block_(space.group_block()), outnumber_cores_(group.size() > usable_cores()) {
  for (int q = 0; q < group.size(); ++q) blocks_.push_back(&space.rank_block(q));
}

void Peers::start(const CallSignature& call) {
  call_ = call;
  timed_ = false;
}

bool Peers::all(Arrived arrived) const {
  for (int q = 0; q < size(); ++q)
    if (!arrived(q)) return false;
  return true;
}

void Peers::wake() { ring(group_block_, space_.between_processes()); }

// All operations here are sequentially consistent. One rank stores an arrival and then looks for sleepers. Another rank
// first stores that it sleeps, and then looks for arrivals. At least one of these two ranks therefore sees the other.
void Peers::sleep(Arrived arrived) const {
  group_block_.sleepers.fetch_add(1);
  const std::uint32_t seen = group_block_.bell.load();
  if (!all(arrived)) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    futex_wait(group_block_.bell, seen, std::clamp(left, std::chrono::milliseconds(1), kSlice),
               space_.between_processes());
  }
  group_block_.sleepers.fetch_sub(1);
}

absl::Status Peers::wait(Arrived arrived) {
  auto looked = Clock::now();
  if (!std::exchange(timed_, true))
    deadline_ = looked + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(group_.timeout_s));
  while (!all(arrived)) {
    const bool slept_a_slice = Clock::now() - looked >= kSlice;
    if (slept_a_slice) looked = Clock::now();
    TESSERA_RETURN_IF_ERROR(look(slept_a_slice, arrived));
    sleep(arrived);
  }
  return absl::OkStatus();
}

absl::Status Peers::reason_of_loss() {
  const auto everyone = [](int) { return true; };
  for (const auto end = Clock::now() + std::chrono::seconds(1); Clock::now() < end; std::this_thread::yield())
    if (auto reason = look(true, everyone); !reason.ok()) return reason;
  return make_error(ExitCode::kPeerLost, prefix() +
                                             "another rank gave up, and was gone before it could say why. [T0490] "
                                             "hint: what it printed last, or its launcher, says why it ended");
}

absl::Status Peers::begin_access() {
  self().accessing.store(1);
  if (group_block_.failed.load() == 0) return absl::OkStatus();
  end_access();
  TESSERA_RETURN_IF_ERROR(status());
  return fail(wait([this](int q) { return q == rank(); }));  // this finds out who failed
}

void Peers::end_access() { self().accessing.store(0, std::memory_order_release); }

void Peers::withdraw() {
  group_block_.failed.store(1);
  wait_for_access_to_end();
}

// If a rank is a thread, its caller may free memory after a failure. Its peers then lose that memory too. (A process
// keeps its own mapping.)
void Peers::wait_for_access_to_end() const {
  if (space_.between_processes()) return;
  for (int q = 0; q < size(); ++q)
    while (q != rank() && blocks_[q]->accessing.load() != 0) std::this_thread::yield();
}

std::vector<int> Peers::missing(Arrived arrived) const {
  std::vector<int> ranks;
  for (int q = 0; q < size(); ++q)
    if (!arrived(q)) ranks.push_back(q);
  return ranks;
}

absl::Status Peers::look(bool slept, Arrived arrived) const {
  TESSERA_RETURN_IF_ERROR(status());
  const bool alarm = group_block_.alarms.load() > 0;
  if (!alarm && !slept) return absl::OkStatus();
  for (int q : missing(arrived))
    if (!space_.alive(q) && !arrived(q) && blocks_[q]->state.load() == RankState::kRunning)
      return make_error(ExitCode::kPeerLost, prefix() + who(q) + " is gone" + last_seen(q) +
                                                 ". [T0491] hint: what it printed last, or its launcher, says why it "
                                                 "ended (dmesg: was its memory short?)");
  for (int q = 0; alarm && q < size(); ++q)
    if (q != rank() && blocks_[q]->state.load() == RankState::kFailed) return failure_of(q);
  // A rank may have left because of a failure that this rank has not seen yet, so leaving is reported last.
  for (int q : slept ? missing(arrived) : std::vector<int>())
    if (blocks_[q]->state.load() == RankState::kLeft)
      return make_error(
          ExitCode::kPeerLost,
          prefix() + who(q) + " has left" + last_seen(q) +
              ". [T0492] hint: every rank takes as many steps, and makes as many other calls, as the others");
  return Clock::now() < deadline_ ? absl::OkStatus() : timeout_error(arrived);
}

absl::Status Peers::failure_of(int rank) const {
  const RankBlock& block = *blocks_[rank];
  return told_by_peer(
      make_error(static_cast<ExitCode>(block.exit_code), prefix() + who(rank) + " gave up: " + block.message));
}

absl::Status Peers::timeout_error(Arrived arrived) const {
  std::string text = prefix() + "timed out after " + seconds(group_.timeout_s) + " waiting for ";
  const std::vector<int> ranks = missing(arrived);
  for (std::size_t i = 0; i < ranks.size(); ++i) text += (i ? "; " : "") + who(ranks[i]) + last_seen(ranks[i]);
  return make_error(ExitCode::kPeerLost,
                    text +
                        " (comm.timeout_s sets the limit). [T0493] hint: a rank that does not come stands still (state "
                        "T in `ps`: stopped), or computes for longer than the limit");
}

std::string Peers::last_seen(int rank) const {
  const CallSignature call = latest_call(*blocks_[rank]);
  if (call.operation == Operation::kNone) return ", which has made no call yet";
  return ", last in " + call.describe();
}

std::string Peers::prefix() const { return group_.self() + " " + where(call_) + ": "; }

std::string Peers::who(int rank) const {
  const auto process = blocks_[rank]->process.load();
  return group_.who(rank) + (process ? " (pid " + std::to_string(process) + ")" : "");
}

absl::Status Peers::fail(const absl::Status& reason) {
  {
    const MutexLock lock(mutex_);
    if (!failure_.ok()) return failure_;
    failure_ = reason;
  }
  mark_failed(group_block_, self(), reason, space_.between_processes());
  wait_for_access_to_end();
  return reason;
}

absl::Status Peers::status() const {
  if (self().state.load(std::memory_order_acquire) == RankState::kRunning) return absl::OkStatus();
  if (auto known = failure(); !known.ok()) return known;
  // The rank was ended by run_ranks, which saw the rank's body throw or return.
  return make_error(
      ExitCode::kPeerLost,
      prefix() + "this rank has already left the group. [T0494] hint: make no call after the program's end");
}

absl::Status Peers::failure() const {
  const MutexLock lock(mutex_);
  return failure_;
}

void Peers::leave() { mark_left(group_block_, self(), space_.between_processes()); }

}  // namespace tessera
