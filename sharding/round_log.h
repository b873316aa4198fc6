#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <utility>
#include <vector>

namespace tessera {

/// What ranks do together in one microbatch, in its order in time: units that are used, and so gathered, in forward and backward; where a
/// backward begins and ends; and where a unit's reduction begins. With it a rank that has no batch does the same as the others, which
/// wait for each other in this order (Engine::backward_nothing).
///
/// The latest microbatch that ended is kept. What came before its forward (evaluation) is left out where it ends like the one before, and
/// `forget` leaves it out always. Nothing is allocated once microbatches are alike.
class RoundLog {
 public:
  /// Events that are no use of a unit, which is its index.
  enum Event : int {
    kBackward = -1,
    kReduction = -2,
    kEnd = -3,
    kBesides = -4,  ///< the unit used next is used while the one before it still is
    /// Is announced, and not kept, in place of kEnd where the microbatch goes on with another loss (MicrobatchInfo::retain_graph).
    kEndOfLoss = -5,
  };

  /// Who hears of events before they happen, where ranks meet at each of them, until the microbatch ends; null: nobody.
  void tell(std::function<void(int event)> told) { told_ = std::move(told); }
  /// This rank is about to do what the event stands for. Between the announcement of an end and end_round what all do alike is announced
  /// no more.
  void announce(int event) {
    if (!told_ || ending_ != kGoesOn) return;
    told_(event);
    if (event == kEnd || event == kEndOfLoss) ending_ = event;
  }
  /// A backward, and what it began, has ended.
  void end_round() {
    if (std::exchange(ending_, kGoesOn) == kEnd) told_ = nullptr;
  }

  void announce_and_add(int event) {
    announce(event);
    add(event);
  }
  void add(int event) {
    if (running_.size() == kMost) running_.erase(running_.begin(), running_.begin() + kMost / 2);
    running_.push_back(event);
  }
  /// The microbatch has ended with its latest event.
  void end_microbatch() {
    const bool same_end = !last_.empty() && running_.size() >= last_.size() &&
                          std::equal(last_.rbegin(), last_.rend(), running_.rbegin());
    if (!same_end) last_.swap(running_);
    running_.clear();
  }
  bool has_nothing() const { return running_.empty(); }
  /// What has come since then is of no microbatch.
  void forget() { running_.clear(); }

  /// The events of the latest microbatch; empty before the first has ended.
  std::span<const int> last() const { return last_; }

 private:
  static constexpr std::size_t kMost = std::size_t{1} << 16;
  static constexpr int kGoesOn = 0;

  std::vector<int> running_, last_;
  std::function<void(int event)> told_;
  int ending_ = kGoesOn;  ///< or the end that was announced
};

}  // namespace tessera
