#pragma once

// See docs/glossary.md: unit.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace tessera {

/// Records the events of one microbatch that concern all ranks, in order of time. These events are uses (and therefore
/// gathers) of units in forward and backward, the beginning and the end of a backward, and the beginning of a unit's
/// reduction. A rank without a batch follows this record, so that it makes the same collectives as the other ranks, in
/// the same order (Engine::backward_nothing).
///
/// The record of the latest complete microbatch is kept. Events before its forward (evaluation) are left out if the
/// microbatch ends with the same events as the previous microbatch; `forget` always leaves them out. Nothing is
/// allocated once microbatches are equal.
class RoundLog {
 public:
  /// Events other than the use of a unit; a use is recorded as the unit's index.
  enum Event : int {
    kBackward = -1,
    kReduction = -2,
    kEnd = -3,
    kBesides = -4,  ///< the next unit is used while the unit before it is still in use
    /// It is announced instead of kEnd if the microbatch continues with another loss (MicrobatchInfo::retain_graph). It
    /// is not recorded.
    kEndOfLoss = -5,
  };

  /// Sets the function that is called for each event before it happens, until the microbatch ends. It is meant for
  /// ranks that wait for each other at each event. If it is null, no function is called.
  void tell(std::function<void(int event)> told) { told_ = std::move(told); }
  /// It is called before this rank performs the event. After the end of a round is announced, nothing more is announced
  /// until end_round, because the actions in between are the same on all ranks.
  void announce(int event) {
    if (!told_ || ending_ != kGoesOn) return;
    told_(event);
    if (event == kEnd || event == kEndOfLoss) ending_ = event;
  }
  /// It is called when a backward, and all calls that it began, have ended.
  void end_round() {
    if (std::exchange(ending_, kGoesOn) == kEnd) told_ = nullptr;
  }

  /// Announces the event and records it.
  void announce_and_add(int event) {
    announce(event);
    add(event);
  }
  /// Appends the event to the record.
  void add(int event) {
    if (running_.size() == kMost) running_.erase(running_.begin(), running_.begin() + kMost / 2);
    running_.push_back(event);
  }
  /// It is called when the microbatch has ended, after its last event.
  void end_microbatch() {
    const bool same_end = !last_.empty() && running_.size() >= last_.size() &&
                          std::equal(last_.rbegin(), last_.rend(), running_.rbegin());
    if (!same_end) last_.swap(running_);
    running_.clear();
  }
  bool has_nothing() const { return running_.empty(); }
  /// Forgets the events since the last microbatch, which do not belong to a microbatch.
  void forget() { running_.clear(); }

  /// Returns the events of the latest microbatch; empty before the first has ended.
  std::span<const int> last() const { return last_; }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 16;
  static constexpr int kGoesOn = 0;

  std::vector<int> running_, last_;
  std::function<void(int event)> told_;
  int ending_ = kGoesOn;  ///< kGoesOn, or the end that was announced
};

}  // namespace tessera
