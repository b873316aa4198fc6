#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
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
  };

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
  std::vector<int> running_, last_;
};

}  // namespace tessera
