#pragma once

#include <absl/container/inlined_vector.h>

#include <cstddef>
#include <limits>
#include <vector>

namespace tessera {

/// The order in which units are used in one round (forward and backward of one microbatch): recorded while it
/// happens, replayed in the next. Consecutive uses of one unit are one entry.
///
/// The schedule only advises: what to gather early and what to give up. Wrong advice costs a gather, never a result,
/// so a round that departs from the record (another branch, an evaluation in between) is simply recorded anew.
class Schedule {
 public:
  static constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

  /// Tells that `unit` is used now. Follows the record: the cursor moves to this use in it, or stays where the use is
  /// not in it.
  void use(int unit);
  /// Ends the round. The round just seen becomes the record if it differs from it.
  void end_round();

  bool recorded() const { return !record_.empty(); }
  const std::vector<int>& record() const { return record_; }
  /// The next distinct units that the record says will be used after now, at most `count`.
  absl::InlinedVector<int, 8> upcoming(std::size_t count) const;
  /// How many entries of the record lie between now and the next use of `unit`; kNever if it is not used again this
  /// round. Before anything is recorded: by last use, so that the least recently used looks farthest.
  std::size_t distance(int unit) const;

 private:
  std::vector<int> record_;  ///< the round that is followed
  std::vector<int> seen_;    ///< the round under way
  std::size_t cursor_ = 0;   ///< entries of record_ before it are over
};

}  // namespace tessera
