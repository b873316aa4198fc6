#pragma once

#include <array>
#include <cstdint>

#include "runtime/comm/shared/peer_buffers.h"

namespace tessera {

/// Sums that the ranks of a shared-memory group have started and not yet waited for, so that a rank need not meet its
/// peers where it makes a gradient, only some gradients later.
///
/// Nobody works behind a rank's back: its share of a sum (reduce-scatter: its part; all-reduce: its slice of all
/// outputs) is done by the rank itself in Work::advance, once all have started the call (Lane::kStarted). When all have
/// done theirs (Lane::kFinished) the sum is over, and its inputs are free; that is what Work::wait waits for. Both
/// happen in the order of the calls.
///
/// So a rank that waits depends on its peers' getting as far as they promised with the same program: where every rank
/// advances and waits at the same places, the rank that is furthest behind can always go on.
///
/// One thread at a time, as Collectives.
class StartedReductions {
 public:
  /// Does a call with buffers that peers cannot reach. All ranks do it at the same time, and it blocks.
  class Fallback {
   public:
    virtual absl::Status reduce_blocking(const CallDescriptor& call, const std::byte* input, float* output,
                                         SumVisitor* visitor) = 0;

   protected:
    ~Fallback() = default;
  };

  StartedReductions(Peers& peers, SharedSpace& space, Fallback& fallback);

  /// `call` is a reduce_scatter or an all_reduce, with the locations of its buffers.
  Work start(const CallDescriptor& call, const std::byte* input, float* output, SumVisitor* visitor);

  /// Waits for all that are under way, as a call that blocks must first.
  absl::Status finish() { return wait(started_.phase()); }

 private:
  struct Reduction final : Work::State {
    absl::Status advance() override { return owner->advance(number); }
    absl::Status wait() override { return owner->wait(number); }
    void release() override { owner->release(*this); }

    StartedReductions* owner = nullptr;
    bool held = false;         ///< by a Work
    std::uint64_t number = 0;  ///< of the phases in both lanes
    CallDescriptor call;
    const std::byte* input = nullptr;
    float* output = nullptr;
    SumVisitor* visitor = nullptr;
  };

  absl::Status status();
  Reduction& reduction(std::uint64_t number) { return ring_[number % ring_.size()]; }
  absl::Status advance(std::uint64_t number);
  absl::Status wait(std::uint64_t number);
  absl::Status do_share(const Reduction& reduction);
  absl::Status share_directly(const Reduction& reduction);
  void release(Reduction& reduction);

  Peers& peers_;
  Fallback& fallback_;
  Meeting started_, finished_;
  PeerBuffers buffers_;
  std::array<Reduction, RankBlock::kReductionSlots> ring_;
  std::uint64_t over_ = 0;     ///< reductions that are
  std::uint64_t dropped_ = 0;  ///< the first whose Work was let go before it was over, or 0
};

}  // namespace tessera
