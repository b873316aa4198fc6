#pragma once

// See docs/glossary.md: advice, residency, slot, unit.

#include <cstddef>
#include <limits>
#include <span>
#include <vector>

#include "sharding/layout/tournament.h"

namespace tessera {

/// Records the order in which units are used in one round (forward and backward of one microbatch), and predicts the
/// next round from this record. Consecutive uses of one unit are one entry of the record. The schedule also records
/// which units are *held* (gathered). It chooses the unit to gather next, and the unit to evict for it. Residency owns
/// a Schedule and calls it from one thread.
///
/// The schedule only gives advice. Wrong advice costs a gather, but never changes a result. If a round differs from the
/// record (another branch was taken), this round becomes the new record. Passes without a backward (evaluation) belong
/// to the round that follows them. If that round ends like the record, the record stays, but not twice in a row.
///
/// Every call takes O(log units); the cost of `use` and `end_round` is amortised over the entries of a round. Nothing
/// is allocated once rounds are equal. The object needs a few words of memory for each unit, for each entry of the
/// record, and for each entry of the round under way. Only the last kLongestRound entries of a round are kept.
class Schedule {
 public:
  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();
  static constexpr std::size_t kLongestRound = std::size_t{1} << 16;

  /// Units are 0 ... units - 1, and at first none of them is held. `ahead` is the number of distinct units that
  /// `next_missing` examines. `uncounted`, unless it is -1, is a unit that takes no slot from others: `next_missing`
  /// examines it in addition to these `ahead` units.
  Schedule(int units, std::size_t ahead, int uncounted = -1);

  /// It is called when `unit` is used. The cursor moves behind this use in the record. If the record has no later use
  /// of the unit, the cursor stays. In that case only the record's first unit moves the cursor, back to the beginning,
  /// since a forward pass begins with this unit.
  void use(int unit);
  /// It is called at the end of a round. The round becomes the record if it differs from the present record, except for
  /// the case of an evaluation that is described above.
  void end_round();

  bool recorded() const { return !record_.empty(); }
  std::span<const int> record() const { return record_; }
  /// Returns the number of entries that are kept of the round under way.
  std::size_t seen() const { return seen_.size(); }

  /// Returns the number of entries of the record between the cursor and the next use of `unit`; kNever if the unit is
  /// not used again in this round. Before anything is recorded, the least recently used unit counts as farthest.
  std::size_t distance(int unit) const;

  /// These functions are called when `unit` becomes held, and when it is no longer held.
  void hold(int unit);
  void give_up(int unit);

  /// Returns the unit to prefetch. It is the first unit that is not held among the next `ahead` distinct units of the
  /// record; -1 if all of them are held. `uncounted` may be returned too, if it is used before the last of these units.
  int next_missing();
  /// Returns the unit to evict: among the held units for which `may_go(unit)` is true, the unit whose next use is
  /// farthest away. If several have the same distance, it is the unit with the lowest number. Returns -1 if no such
  /// unit has a distance above `later_than`. Each held unit that may not be evicted adds to the cost of the call.
  template <class MayGo>
  int farthest_held(std::size_t later_than, const MayGo& may_go);
  /// Returns the unit to evict, without a limit on the distance.
  template <class MayGo>
  int farthest_held(const MayGo& may_go);

 private:
  static constexpr std::size_t kNowhere = kNever;  ///< a position that no record has

  std::size_t lateness(int unit) const;
  void rank(int unit);
  void pass();
  void rewind();
  void note(int unit);
  void follow(const std::vector<int>& round);
  template <class MayGo, class IsFar>
  int search_held(const MayGo& may_go, const IsFar& is_far);

  const std::size_t ahead_;
  const int uncounted_;
  std::vector<int> record_;     ///< the round that is followed
  std::vector<int> seen_;       ///< the round under way
  int last_ = -1;               ///< the unit used last in the round
  bool has_tolerated_ = false;  ///< whether the last round differed from the record, but ended in the same way
  std::size_t cursor_ = 0;      ///< number of entries of record_ that were already used in this round
  /// [position in the record]: position of the same unit's next entry, or kNowhere
  std::vector<std::size_t> following_;
  std::vector<std::size_t> next_;  ///< [unit]: position of its first entry at or behind the cursor, or kNowhere
  /// Entries [cursor_, window_end_) use window_units_ distinct units, at most `ahead_`. The unit uncounted_ may be used
  /// there too.
  std::size_t window_end_ = 0, window_units_ = 0;
  std::size_t uses_ = 0;               ///< number of uses before there is a record
  std::vector<std::size_t> last_use_;  ///< [unit]: the number of its last use, counted from 1, before there is a record
  Tournament held_;                    ///< held units, ranked by lateness
  Tournament missing_;                 ///< units that are not held and are used again, the next one first
  std::vector<int> aside_;             ///< held units that a search found and that must not be evicted
};

template <class MayGo, class IsFar>
int Schedule::search_held(const MayGo& may_go, const IsFar& is_far) {
  int found = -1;
  while (found < 0 && !held_.empty() && is_far(held_.best())) {
    if (may_go(held_.best())) {
      found = held_.best();
    } else {
      aside_.push_back(held_.best());
      held_.remove(held_.best());
    }
  }
  for (const int unit : aside_) held_.put(unit, lateness(unit));
  aside_.clear();
  return found;
}

template <class MayGo>
int Schedule::farthest_held(std::size_t later_than, const MayGo& may_go) {
  return search_held(may_go, [&](int unit) { return distance(unit) > later_than; });
}

template <class MayGo>
int Schedule::farthest_held(const MayGo& may_go) {
  return search_held(may_go, [](int) { return true; });
}

}  // namespace tessera
