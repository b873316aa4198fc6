#include "runtime/comm/meeting.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <thread>
#include <utility>

#include "runtime/base/error.h"
#include "runtime/comm/futex.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEagerLooks = 32;  // before the first pause: a pause may take as long as a meeting
constexpr int kLooksPerYield = 40;
constexpr std::chrono::microseconds kSpin{30};
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

Meeting::Meeting(const Group& group, SharedSpace& space)
    : group_(group),
      space_(space),
      group_block_(space.group_block()),
      looks_per_yield_(group.size() <= usable_cores() ? kLooksPerYield : 1) {
  for (int q = 0; q < group.size(); ++q) blocks_.push_back(&space.rank_block(q));
}

void Meeting::start(const CallSignature& call) {
  call_ = call;
  timed_ = false;
}

void Meeting::publish(const CallDescriptor& call) {
  RankBlock& block = self();
  const int parity = next_parity();
  block.calls[parity].store(call.signature);
  block.current.store(static_cast<std::uint32_t>(parity), std::memory_order_relaxed);
  Arrival& arrival = block.arrivals[parity];
  arrival.digest.store(digest_of(call.signature), std::memory_order_relaxed);
  arrival.input_segment.store(call.input.segment, std::memory_order_relaxed);
  arrival.input_offset.store(call.input.offset, std::memory_order_relaxed);
  arrival.output_segment.store(call.output.segment, std::memory_order_relaxed);
  arrival.output_offset.store(call.output.offset, std::memory_order_relaxed);
}

bool Meeting::all_published_the_same() const {
  const std::uint64_t digest = own_arrival().digest.load(std::memory_order_relaxed);
  return std::all_of(blocks_.begin(), blocks_.end(), [&](const RankBlock* block) {
    return block->arrivals[phase_ & 1].digest.load(std::memory_order_relaxed) == digest;
  });
}

Location Meeting::input_of(int rank) const {
  const Arrival& arrival = blocks_[rank]->arrivals[phase_ & 1];
  return {arrival.input_segment.load(std::memory_order_relaxed),
          arrival.input_offset.load(std::memory_order_relaxed)};
}

Location Meeting::output_of(int rank) const {
  const Arrival& arrival = blocks_[rank]->arrivals[phase_ & 1];
  return {arrival.output_segment.load(std::memory_order_relaxed),
          arrival.output_offset.load(std::memory_order_relaxed)};
}

// Sequentially consistent, all of it: who stores an arrival and then looks (for sleepers, for a doubt, for the other
// arrivals), and who looks for arrivals after having said that it sleeps or doubts, cannot both miss each other.
absl::Status Meeting::meet() {
  TESSERA_RETURN_IF_ERROR(status());
  ++phase_;
  own_arrival().phase.store(phase_);
  if (group_block_.sleepers.load() > 0 && complete()) ring(group_block_, space_.between_processes());
  if (!spin()) TESSERA_RETURN_IF_ERROR(wait());
  if (group_block_.doubt.load() == 0 || vote(true)) return absl::OkStatus();
  return fail(reason_of_loss());
}

bool Meeting::arrived(int rank) const { return blocks_[rank]->arrivals[phase_ & 1].phase.load() == phase_; }

bool Meeting::complete() const {
  for (int q = 0; q < group_.size(); ++q)
    if (!arrived(q)) return false;
  return true;
}

// Yields now and then: where another rank waits for this core, spinning on would keep it from arriving.
bool Meeting::spin() const {
  for (int i = 0; i < kEagerLooks; ++i)
    if (complete()) return true;
  for (const auto end = Clock::now() + kSpin; Clock::now() < end; sched_yield())
    for (int i = 0; i < looks_per_yield_; ++i) {
      if (complete()) return true;
      pause_core();
    }
  return complete();
}

void Meeting::sleep() const {
  group_block_.sleepers.fetch_add(1);
  const std::uint32_t seen = group_block_.bell.load();
  if (!complete()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline_ - Clock::now());
    futex_wait(group_block_.bell, seen, std::clamp(left, std::chrono::milliseconds(1), kSlice),
               space_.between_processes());
  }
  group_block_.sleepers.fetch_sub(1);
}

// OK once all have arrived.
absl::Status Meeting::wait() {
  auto looked = Clock::now();
  if (!std::exchange(timed_, true))
    deadline_ =
        looked + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(group_.timeout_s));
  while (!complete()) {
    const bool slept_a_slice = Clock::now() - looked >= kSlice;
    if (slept_a_slice) looked = Clock::now();
    const absl::Status status = look_at_peers(slept_a_slice);
    if (!status.ok()) {
      group_block_.doubt.store(1);
      return vote(complete()) ? absl::OkStatus() : fail(status);
    }
    if (!complete()) sleep();
  }
  return absl::OkStatus();
}

// A rank votes after `doubt` is set. If it saw an arrival missing then, nobody has gone on without a vote. A vote for a
// later phase says that this one was over.
bool Meeting::vote(bool over) const {
  const std::uint64_t mine = 2 * phase_ + (over ? 1 : 0);
  std::uint64_t seen = group_block_.verdict.load();
  while (seen / 2 < phase_)
    if (group_block_.verdict.compare_exchange_weak(seen, mine)) return over;
  return seen / 2 > phase_ || seen % 2 == 1;
}

// All arrived, but one rank had already given up, and will say why in a moment.
absl::Status Meeting::reason_of_loss() {
  for (const auto end = Clock::now() + std::chrono::seconds(1); Clock::now() < end; std::this_thread::yield())
    if (auto reason = look_at_peers(true); !reason.ok()) return reason;
  return make_error(ExitCode::kPeerLost,
                    prefix() + "another rank gave up, and was gone before it could say why");
}

absl::Status Meeting::begin_access() {
  self().accessing.store(1);
  if (group_block_.failed.load() == 0) return absl::OkStatus();
  end_access();
  return meet();  // finds out who failed
}

void Meeting::end_access() { self().accessing.store(0, std::memory_order_release); }

// On threads, what the caller frees after a failure is gone for its peers too. (A process keeps its own
// mapping.)
void Meeting::wait_for_access_to_end() const {
  if (space_.between_processes()) return;
  for (int q = 0; q < group_.size(); ++q)
    while (q != group_.rank && blocks_[q]->accessing.load() != 0) std::this_thread::yield();
}

std::vector<int> Meeting::missing() const {
  std::vector<int> ranks;
  for (int q = 0; q < group_.size(); ++q)
    if (!arrived(q)) ranks.push_back(q);
  return ranks;
}

absl::Status Meeting::look_at_peers(bool slept) const {
  TESSERA_RETURN_IF_ERROR(status());
  const bool alarm = group_block_.alarms.load() > 0;
  if (!alarm && !slept) return absl::OkStatus();
  for (int q : missing())
    if (!space_.alive(q) && !arrived(q) && blocks_[q]->state.load() == RankState::kRunning)
      return make_error(ExitCode::kPeerLost, prefix() + who(q) + " is gone" + last_seen(q));
  for (int q = 0; alarm && q < group_.size(); ++q)
    if (q != group_.rank && blocks_[q]->state.load() == RankState::kFailed) return failure_of(q);
  // Who left may have done so because of a failure that is still on its way to us, so leaving is the last to
  // be told.
  for (int q : slept ? missing() : std::vector<int>())
    if (blocks_[q]->state.load() == RankState::kLeft)
      return make_error(ExitCode::kPeerLost, prefix() + who(q) + " has left" + last_seen(q));
  return Clock::now() < deadline_ ? absl::OkStatus() : timeout_error();
}

absl::Status Meeting::failure_of(int rank) const {
  const RankBlock& block = *blocks_[rank];
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
  const RankBlock& block = *blocks_[rank];
  const CallSignature call = block.calls[block.current.load() & 1].load();
  if (call.operation == Operation::kNone) return ", which has made no call yet";
  return ", last in " + call.describe();
}

std::string Meeting::prefix() const { return group_.self() + " " + where(call_) + ": "; }

std::string Meeting::who(int rank) const {
  const auto process = blocks_[rank]->process.load();
  return group_.who(rank) + (process ? " (pid " + std::to_string(process) + ")" : "");
}

absl::Status Meeting::fail(const absl::Status& reason) {
  {
    std::lock_guard lock(mutex_);
    if (!failure_.ok()) return failure_;
    failure_ = reason;
  }
  mark_failed(group_block_, self(), reason, space_.between_processes());
  wait_for_access_to_end();
  return reason;
}

absl::Status Meeting::status() const {
  if (self().state.load(std::memory_order_acquire) == RankState::kRunning) return absl::OkStatus();
  std::lock_guard lock(mutex_);
  if (!failure_.ok()) return failure_;
  // Ended from outside: by run_ranks, which saw the rank's body throw or return.
  return make_error(ExitCode::kPeerLost, prefix() + "this rank has already left the group");
}

void Meeting::leave() { mark_left(group_block_, self(), space_.between_processes()); }

}  // namespace tessera
