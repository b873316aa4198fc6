#pragma once

#include <array>
#include <cstdint>

#include "runtime/comm/shared/peer_buffers.h"

namespace tessera {

/// Reductions that the ranks of a shared-memory group have started and not yet waited for. A rank that makes a gradient
/// need not wait for its peers at once, but only some gradients later.
///
/// No other thread works for a rank. The rank itself does its share of a sum in Work::advance, after all ranks have
/// started the call (Lane::kStarted). Its share of a reduce-scatter is its own part of the sum. Its share of an
/// all-reduce is its slice of all outputs. The sum is over when all ranks have done their shares (Lane::kFinished). Its
/// inputs are free then. Work::wait waits until the sum is over. Shares and waits come in the order of the calls.
///
/// A rank that waits therefore relies on its peers to advance their calls as far as the same program does on this rank.
/// If every rank advances and waits at the same places, the rank that is furthest behind can always continue.
///
/// Only one thread at a time may use an object of this class, as with Collectives.
class StartedReductions {
 public:
  /// Makes a call with buffers that peers cannot reach. All ranks do so at the same time, and the call blocks.
  class Fallback {
   public:
    virtual absl::Status reduce_blocking(const CallDescriptor& call, const std::byte* input, float* output,
                                         SumVisitor* visitor) = 0;

   protected:
    ~Fallback() = default;
  };

  StartedReductions(Peers& peers, SharedSpace& space, Fallback& fallback);

  /// Starts `call`, a reduce_scatter or an all_reduce, with the locations of its buffers.
  Work start(const CallDescriptor& call, const std::byte* input, float* output, SumVisitor* visitor);

  /// Waits for all reductions under way. A collective that blocks must call this function first.
  absl::Status finish() { return wait(started_.phase()); }

 private:
  struct Reduction final : Work::State {
    absl::Status advance() override { return owner->advance(number); }
    absl::Status wait() override { return owner->wait(number); }
    void release() override { owner->release(*this); }

    StartedReductions* owner = nullptr;
    bool held = false;         ///< whether a Work holds this entry
    std::uint64_t number = 0;  ///< the reduction's phase in the lanes kStarted and kFinished
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
  std::uint64_t over_ = 0;     ///< number of reductions that are over
  std::uint64_t dropped_ = 0;  ///< first reduction whose Work was dropped before its end, or 0
};

}  // namespace tessera
