#pragma once

// See docs/glossary.md: slot.

#include <absl/status/status.h>

#include <cstdint>
#include <vector>

#include "runtime/comm/shared/peers.h"

namespace tessera {

/// The barrier of the ranks of a shared-memory group. Its phases are numbered from 1, separately for each Lane. After
/// phase k is over, every rank sees everything that any rank wrote before it entered phase k. A rank may enter phases
/// before it waits for them (`arrive`, `await`), up to as many as the lane has slots. It waits for them in order. Only
/// one thread at a time may use a Meeting.
///
/// Each rank writes its own arrival and reads those of its peers. No two ranks write the same arrival. A phase is over
/// when all ranks have arrived. This rule alone would let one rank continue while another rank gives up because its
/// time ended just before the last arrival. A rank that is about to give up therefore sets GroupBlock::doubt first, and
/// then the ranks vote on the phase (GroupBlock::verdicts). After the vote, the phase is over on all ranks, or on none.
///
/// A waiting rank spins for some microseconds, and yields its core now and then (at every check if there are more ranks
/// than cores). It sleeps afterwards (Peers::wait). After the first failure every wait returns that failure.
class Meeting {
 public:
  Meeting(Peers& peers, SharedSpace& space, Lane lane);

  /// Makes `call` known to the peers in the next phase. It does nothing after this rank has failed, since there will be
  /// no next phase.
  void publish(const CallDescriptor& call);
  /// Enters the next phase and returns its number k. REQUIRES: phase k - n is over, where n is the number of slots of
  /// the lane.
  std::uint64_t arrive();
  /// Waits until every rank has entered `phase`. REQUIRES: this rank has entered `phase`, and has waited for the phases
  /// before it.
  absl::Status await(std::uint64_t phase);
  /// Enters the next phase and waits for it.
  absl::Status meet();

  /// These functions read what ranks published for a phase that is over. The first compares the signatures of all
  /// ranks.
  bool all_published_the_same(std::uint64_t phase) const;
  Location input_of(int rank, std::uint64_t phase) const;
  Location output_of(int rank, std::uint64_t phase) const;
  /// Makes all ranks fail with a message that shows two calls that differ. Returns that failure.
  absl::Status disagreement(std::uint64_t phase);

  /// Returns the last phase that this rank entered.
  std::uint64_t phase() const { return phase_; }

 private:
  struct Slots {
    Arrival* arrivals;
    PublishedCall* calls;
  };

  std::size_t slot(std::uint64_t phase) const { return phase % slots_; }
  const Arrival& arrival_of(int rank, std::uint64_t phase) const { return ranks_[rank].arrivals[slot(phase)]; }
  bool arrived(int rank, std::uint64_t phase) const { return arrival_of(rank, phase).phase.load() == phase; }
  bool complete(std::uint64_t phase) const;
  bool spin(std::uint64_t phase) const;
  bool vote(std::uint64_t phase, bool over) const;

  Peers& peers_;
  GroupBlock& group_block_;
  const Lane lane_;
  std::size_t slots_ = 0;
  std::vector<Slots> ranks_;
  RankBlock& self_;
  const int looks_per_yield_;
  std::uint64_t phase_ = 0;
};

}  // namespace tessera
