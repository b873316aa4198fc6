#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace tessera {

/// Finds ranks that keep the others waiting. Of each step it is told how long every rank was busy: from the end of its last step to the
/// agreement of this one, without what it waited in collectives, so with its data, its forward and its backward. A rank is slow if its
/// median over a window of steps is more than 1.5 times that of the ranks' medians (the lower one of two), and 10 ms more.
class StragglerWatch {
 public:
  static constexpr std::size_t kWindow = 50;  ///< steps

  explicit StragglerWatch(std::size_t ranks);

  /// By rank, of one step. At the end of a window a message that names the slow ranks, their times and the median; else empty.
  std::string add(std::span<const double> busy_seconds);

 private:
  std::string look() const;

  std::vector<std::vector<double>> seconds_;  ///< [rank][step of this window]
};

}  // namespace tessera
