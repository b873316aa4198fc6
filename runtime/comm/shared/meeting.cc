#include "runtime/comm/shared/meeting.h"

#include <sched.h>

#include <chrono>
#include <iterator>

#include "runtime/base/status.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kEagerLooks = 32;  // checks before the first pause; a pause may take as long as a whole barrier
constexpr int kLooksPerYield = 40;
constexpr std::chrono::microseconds kSpin{30};

void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Meeting::Meeting(Peers& peers, SharedSpace& space, Lane lane)
    : peers_(peers),
      group_block_(space.group_block()),
      lane_(lane),
      self_(space.rank_block(peers.rank())),
      looks_per_yield_(peers.outnumber_cores() ? 1 : kLooksPerYield) {
  const auto use = [this](auto& block) {
    slots_ = std::size(block.arrivals);
    ranks_.push_back({block.arrivals, block.calls});
  };
  for (int q = 0; q < peers.size(); ++q) {
    RankBlock& block = space.rank_block(q);
    switch (lane) {
      case Lane::kCalls:
        use(block.blocking);
        break;
      case Lane::kStarted:
        use(block.started);
        break;
      case Lane::kFinished:
        use(block.finished);
        break;
    }
  }
}

void Meeting::publish(const CallDescriptor& call) {
  if (!peers_.status().ok()) return;  // the phase before may not be over, so a peer may still read that slot
  const std::size_t next = slot(phase_ + 1);
  ranks_[peers_.rank()].calls[next].store(call.signature);
  self_.current.store(static_cast<std::uint32_t>(lane_) << 16 | static_cast<std::uint32_t>(next),
                      std::memory_order_relaxed);
  Arrival& arrival = ranks_[peers_.rank()].arrivals[next];
  arrival.digest.store(digest_of(call.signature), std::memory_order_relaxed);
  arrival.input_segment.store(call.input.segment, std::memory_order_relaxed);
  arrival.input_offset.store(call.input.offset, std::memory_order_relaxed);
  arrival.output_segment.store(call.output.segment, std::memory_order_relaxed);
  arrival.output_offset.store(call.output.offset, std::memory_order_relaxed);
}

bool Meeting::all_published_the_same(std::uint64_t phase) const {
  const auto digest = [&](int q) { return arrival_of(q, phase).digest.load(std::memory_order_relaxed); };
  for (int q = 1; q < peers_.size(); ++q)
    if (digest(q) != digest(0)) return false;
  return true;
}

Location Meeting::input_of(int rank, std::uint64_t phase) const {
  const Arrival& arrival = arrival_of(rank, phase);
  return {arrival.input_segment.load(std::memory_order_relaxed), arrival.input_offset.load(std::memory_order_relaxed)};
}

Location Meeting::output_of(int rank, std::uint64_t phase) const {
  const Arrival& arrival = arrival_of(rank, phase);
  return {arrival.output_segment.load(std::memory_order_relaxed),
          arrival.output_offset.load(std::memory_order_relaxed)};
}

absl::Status Meeting::disagreement(std::uint64_t phase) {
  const auto call_of = [&](int q) { return ranks_[q].calls[slot(phase)].load(); };
  const CallSignature first = call_of(0);
  int other = 1;
  while (other + 1 < peers_.size() && call_of(other) == first) ++other;
  return peers_.fail(make_error(
      ExitCode::kInternal, peers_.prefix() + "ranks disagree: " + peers_.who(0) + " calls " + first.describe() + ", " +
                               peers_.who(other) + " calls " + call_of(other).describe() +
                               ". [T0486] hint: every rank must make the same calls in the same order"));
}

// Every operation here is sequentially consistent. One rank stores an arrival and then looks for sleepers, for a doubt,
// or for the other arrivals. Another rank first stores that it sleeps or doubts, and then looks for arrivals. At least
// one of these two ranks therefore sees the other.
std::uint64_t Meeting::arrive() {
  ++phase_;
  ranks_[peers_.rank()].arrivals[slot(phase_)].phase.store(phase_);
  if (peers_.anyone_sleeps() && complete(phase_)) peers_.wake();
  return phase_;
}

absl::Status Meeting::await(std::uint64_t phase) {
  TESSERA_RETURN_IF_ERROR(peers_.status());
  if (!spin(phase)) {
    const absl::Status status = peers_.wait([&](int q) { return arrived(q, phase); });
    if (!status.ok()) {
      group_block_.doubt.store(1);
      return vote(phase, complete(phase)) ? absl::OkStatus() : peers_.fail(status);
    }
  }
  if (group_block_.doubt.load() == 0 || vote(phase, true)) return absl::OkStatus();
  return peers_.fail(peers_.reason_of_loss());  // all ranks arrived, but one of them had already given up
}

absl::Status Meeting::meet() {
  TESSERA_RETURN_IF_ERROR(peers_.status());
  return await(arrive());
}

bool Meeting::complete(std::uint64_t phase) const {
  for (int q = 0; q < peers_.size(); ++q)
    if (!arrived(q, phase)) return false;
  return true;
}

// Spins, and yields now and then. If another rank waits for this core, spinning without a pause would keep that rank
// from arriving.
bool Meeting::spin(std::uint64_t phase) const {
  for (int i = 0; i < kEagerLooks; ++i)
    if (complete(phase)) return true;
  for (const auto end = Clock::now() + kSpin; Clock::now() < end; sched_yield())
    for (int i = 0; i < looks_per_yield_; ++i) {
      if (complete(phase)) return true;
      pause_core();
    }
  return complete(phase);
}

// A rank votes after `doubt` is set. If an arrival was missing at that time, no rank has gone on without a vote. A vote
// for a later phase shows that this phase was over.
bool Meeting::vote(std::uint64_t phase, bool over) const {
  std::atomic<std::uint64_t>& verdict = group_block_.verdicts[static_cast<std::size_t>(lane_)];
  const std::uint64_t mine = 2 * phase + (over ? 1 : 0);
  std::uint64_t seen = verdict.load();
  while (seen / 2 < phase)
    if (verdict.compare_exchange_weak(seen, mine)) return over;
  return seen / 2 > phase || seen % 2 == 1;
}

}  // namespace tessera
