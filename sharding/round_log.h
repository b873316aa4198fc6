#pragma once

// See docs/glossary.md: unit.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace tessera {

/// Records what ranks do together in one microbatch, in order of time: uses (and so gathers) of units in forward and
/// backward, begin and end of a backward, and begin of a unit's reduction. A rank that has no batch does the same as
/// the others by following this record: all ranks wait for each other in this order (Engine::backward_nothing).
///
/// The latest microbatch that ended is kept. Events before its forward (evaluation) are left out if the microbatch ends
/// like the microbatch before; `forget` always leaves them out. Nothing is allocated once microbatches are alike.
class RoundLog {
 public:
  /// Events other than the use of a unit; a use is recorded as the unit's index.
  enum Event : int {
    kBackward = -1,
    kReduction = -2,
    kEnd = -3,
    kBesides = -4,  ///< the next unit is used while the unit before it is still in use
    /// This is announced in place of kEnd, and not kept, if the microbatch goes on with another loss
    /// (MicrobatchInfo::retain_graph).
    kEndOfLoss = -5,
  };

  /// Sets the function that is told of each event before it happens, until the microbatch ends. The function is for
  /// ranks that wait for each other at each event.
  /// event. null: no function is told.
  void tell(std::function<void(int event)> told) { told_ = std::move(told); }
  /// This is called before this rank performs the event. Nothing is announced between the announcement of an end
  /// and end_round: what happens in between is the same on all ranks.
  void announce(int event) {
    if (!told_ || ending_ != kGoesOn) return;
    told_(event);
    if (event == kEnd || event == kEndOfLoss) ending_ = event;
  }
  /// This is called when a backward, and everything that it began, has ended.
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
  /// This is called when the microbatch has ended; its latest event was the last.
  void end_microbatch() {
    const bool same_end = !last_.empty() && running_.size() >= last_.size() &&
                          std::equal(last_.rbegin(), last_.rend(), running_.rbegin());
    if (!same_end) last_.swap(running_);
    running_.clear();
  }
  bool has_nothing() const { return running_.empty(); }
  /// Forgets the events since the last microbatch: they belong to no microbatch.
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
