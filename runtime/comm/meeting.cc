#include "runtime/comm/meeting.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <thread>

#include "runtime/base/error.h"
#include "runtime/comm/futex.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::microseconds kSpin{20};
constexpr std::chrono::milliseconds kSlice{50};

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Sleepers look at `generation` only; one that looked just before an alarm finds it after its slice.
void raise_alarm(GroupBlock& group, bool between_processes) {
  group.alarms.fetch_add(1);
  futex_wake(group.generation, between_processes);
}

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", value);
  return text;
}

}  // namespace

void mark_failed(GroupBlock& group, RankBlock& rank, const absl::Status& reason, bool between_processes) {
  RankState expected = RankState::kRunning;
  if (!rank.state.compare_exchange_strong(expected, RankState::kFailing)) return;
  group.arrivals.fetch_or(GroupBlock::kPoison);
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

Meeting::Meeting(const Group& group, SharedSpace& space)
    : group_(group), space_(space), may_spin_(group.size() <= usable_cores()) {}

void Meeting::start(const CallSignature& call) {
  call_ = call;
  deadline_ = Clock::now() +
              std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(group_.timeout_s));
}

void Meeting::publish(const CallDescriptor& call) {
  RankBlock& block = self();
  block.calls[next_parity()].store(call);
  block.current.store(static_cast<std::uint32_t>(next_parity()), std::memory_order_relaxed);
}

CallDescriptor Meeting::published_by(int rank) const {
  return space_.rank_block(rank).calls[phase_ & 1].load();
}

absl::Status Meeting::meet() {
  GroupBlock& group = space_.group_block();
  TESSERA_RETURN_IF_ERROR(status());
  ++phase_;
  self().arrived.store(phase_, std::memory_order_release);
  const std::uint64_t arrivals = group.arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  if (arrivals != phase_ * static_cast<std::uint64_t>(group_.size())) return wait();
  // Dekker with sleep(): either it sees the new generation, or we see the sleeper.
  group.generation.store(static_cast<std::uint32_t>(phase_));
  if (group.sleepers.load() > 0) futex_wake(group.generation, space_.between_processes());
  return absl::OkStatus();
}

bool Meeting::over() const {
  const std::uint32_t generation = space_.group_block().generation.load();
  return static_cast<std::int32_t>(generation - static_cast<std::uint32_t>(phase_)) >= 0;
}

bool Meeting::spin() const {
  if (over()) return true;
  if (!may_spin_) return false;
  const auto end = Clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; ++i) {
      pause_core();
      if (over()) return true;
    }
  } while (Clock::now() < end);
  return false;
}

void Meeting::sleep() const {
  GroupBlock& group = space_.group_block();
  group.sleepers.fetch_add(1);
  const std::uint32_t seen = group.generation.load();
  if (static_cast<std::int32_t>(seen - static_cast<std::uint32_t>(phase_)) < 0) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    futex_wait(group.generation, seen, std::clamp(left, std::chrono::milliseconds(1), kSlice),
               space_.between_processes());
  }
  group.sleepers.fetch_sub(1);
}

absl::Status Meeting::wait() {
  if (spin()) return absl::OkStatus();
  auto looked = Clock::now();
  while (!over()) {
    const bool slept_a_slice = Clock::now() - looked >= kSlice;
    if (slept_a_slice) looked = Clock::now();
    absl::Status status = look_at_peers(slept_a_slice);
    if (!status.ok() && close_phase()) return fail(status);
    if (!over()) sleep();
  }
  return absl::OkStatus();
}

// False if the last rank arrived while we looked at our peers: then the phase is over after all.
bool Meeting::close_phase() {
  auto& arrivals = space_.group_block().arrivals;
  std::uint64_t seen = arrivals.load();
  while (!(seen & GroupBlock::kPoison)) {
    if (seen == phase_ * static_cast<std::uint64_t>(group_.size())) return false;
    if (arrivals.compare_exchange_weak(seen, seen | GroupBlock::kPoison)) break;
  }
  return true;
}

absl::Status Meeting::begin_reading() {
  self().reading.store(1);
  if (!(space_.group_block().arrivals.load() & GroupBlock::kPoison)) return absl::OkStatus();
  end_reading();
  return meet();  // finds out who failed
}

void Meeting::end_reading() { self().reading.store(0, std::memory_order_release); }

// On threads, what the caller frees after a failure is gone for its peers too. (A process keeps its own
// mapping.)
void Meeting::wait_for_readers() const {
  if (space_.between_processes()) return;
  for (int q = 0; q < group_.size(); ++q)
    while (q != group_.rank && space_.rank_block(q).reading.load() != 0) std::this_thread::yield();
}

std::vector<int> Meeting::missing() const {
  std::vector<int> ranks;
  for (int q = 0; q < group_.size(); ++q)
    if (space_.rank_block(q).arrived.load(std::memory_order_acquire) < phase_) ranks.push_back(q);
  return ranks;
}

absl::Status Meeting::look_at_peers(bool slept) const {
  TESSERA_RETURN_IF_ERROR(status());
  const bool alarm = space_.group_block().alarms.load() > 0;
  if (!alarm && !slept) return absl::OkStatus();
  for (int q : missing())
    if (!space_.alive(q) && space_.rank_block(q).arrived.load() < phase_ &&
        space_.rank_block(q).state.load() == RankState::kRunning)
      return make_error(ExitCode::kPeerLost, prefix() + who(q) + " is gone" + last_seen(q));
  for (int q = 0; alarm && q < group_.size(); ++q)
    if (q != group_.rank && space_.rank_block(q).state.load() == RankState::kFailed) return failure_of(q);
  // Who left may have done so because of a failure that is still on its way to us, so leaving is the last to
  // be told.
  for (int q : slept ? missing() : std::vector<int>())
    if (space_.rank_block(q).state.load() == RankState::kLeft)
      return make_error(ExitCode::kPeerLost, prefix() + who(q) + " has left" + last_seen(q));
  return Clock::now() < deadline_ ? absl::OkStatus() : timeout_error();
}

absl::Status Meeting::failure_of(int rank) const {
  const RankBlock& block = space_.rank_block(rank);
  return make_error(static_cast<ExitCode>(block.exit_code),
                    prefix() + who(rank) + " gave up: " + block.message);
}

absl::Status Meeting::timeout_error() const {
  std::string text = prefix() + "timed out after " + seconds(group_.timeout_s) + " waiting for ";
  const std::vector<int> ranks = missing();
  for (std::size_t i = 0; i < ranks.size(); ++i)
    text += (i ? "; " : "") + who(ranks[i]) + last_seen(ranks[i]);
  return make_error(ExitCode::kPeerLost, text + " (comm.timeout_s sets the limit)");
}

std::string Meeting::last_seen(int rank) const {
  const RankBlock& block = space_.rank_block(rank);
  const CallSignature call = block.calls[block.current.load() & 1].load().signature;
  if (call.operation == Operation::kNone) return ", which has made no call yet";
  return ", last in " + call.describe();
}

std::string Meeting::prefix() const { return group_.self() + " " + where(call_) + ": "; }

std::string Meeting::who(int rank) const {
  const auto process = space_.rank_block(rank).process.load();
  return group_.who(rank) + (process ? " (pid " + std::to_string(process) + ")" : "");
}

absl::Status Meeting::fail(const absl::Status& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    failure_ = reason;
  }
  mark_failed(space_.group_block(), self(), reason, space_.between_processes());
  wait_for_readers();
  return reason;
}

absl::Status Meeting::status() const {
  if (self().state.load(std::memory_order_acquire) == RankState::kRunning) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  // Ended from outside: by run_ranks, which saw the rank's body throw or return.
  return make_error(ExitCode::kPeerLost, prefix() + "this rank has already left the group");
}

void Meeting::leave() { mark_left(space_.group_block(), self(), space_.between_processes()); }

}  // namespace tessera
