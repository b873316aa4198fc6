#pragma once

// See docs/glossary.md: agreement.

#include <cstddef>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// The rank for which the other ranks waited in a step, and the time for which they waited.
struct WaitedFor {
  int rank = -1;       ///< world rank of the rank that was busy longest; -1: there is only one rank
  double seconds = 0;  ///< mean over the other ranks: the seconds by which this rank was busy longer than each of them
};

/// Returns the rank and the time. `busy_seconds` [rank]: as in StragglerWatch::add; element i is of world rank
/// `first_rank` + i. Where ranks were busy equally long, the first one is named.
WaitedFor waited_for(std::span<const double> busy_seconds, int first_rank = 0);

/// Finds ranks for which the other ranks wait. After each agreement, CpuStep calls `add` with the times for which the
/// ranks were busy in the step. A rank is busy from the end of its last step to the agreement, except while it waits in
/// collectives. A rank is slow if its median over a window of steps is much larger than the median of all ranks'
/// medians: more than 1.5 times as large, and at least 10 ms larger. If two medians lie in the middle, the lower one
/// counts. One thread at a time uses it; all memory is allocated at construction.
class StragglerWatch {
 public:
  static constexpr std::size_t kWindow = 50;  ///< steps

  /// `first_rank`: world rank of the first of `ranks` ranks; the others follow it.
  explicit StragglerWatch(std::size_t ranks, int first_rank = 0);

  /// Adds one step with its `busy_seconds` [rank]. At the end of a window in which some ranks were slow, returns a
  /// message that names them, their times and the median; else returns an empty message.
  std::string add(std::span<const double> busy_seconds);

 private:
  std::string look() const;

  const int first_rank_;
  std::vector<std::vector<double>> seconds_;  ///< [rank][step of this window]
};

}  // namespace tessera
