#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/plan/microbatch_order.h"
#include "tessera/strategy.h"

namespace tessera {

/// Deals a step's microbatches to ranks in runs of neighbours ("deal" by speed). Each rank gets as many as its speed
/// allows, so that all ranks finish together. Speeds are measured over a window of steps: the median of the seconds for
/// which a rank was busy (LocalStep::busy_seconds), divided by its number of microbatches. At the end of a step,
/// Training gives the dealer the seconds on which ranks agreed. So all ranks decide in the same way, and no collective
/// is needed. Runs do not change if new runs would shorten the step by less than 3 %. One thread at a time uses it; all
/// memory is allocated at construction.
class MicrobatchDealer {
 public:
  /// Begins with runs of equal length. REQUIRES: deal.by is kSpeed, ranks > 1.
  MicrobatchDealer(const Strategy& strategy, int ranks);

  /// Returns the runs of the next step.
  const MicrobatchOrder& order() const { return order_; }
  /// Adds a step with its `busy_seconds` [rank]. Returns whether `order` has changed. `computed` [rank]: the number of
  /// microbatches on which the seconds were spent ("deal.backups"); if it is empty, the seconds were spent on the
  /// rank's run.
  bool add(std::span<const double> busy_seconds, std::span<const std::int64_t> computed = {});

 private:
  MicrobatchOrder order_;
  const std::size_t window_;
  std::vector<std::vector<double>> busy_;      ///< [rank][step of this window]: seconds of one microbatch
  std::vector<double> seconds_;                ///< [rank]: seconds of one microbatch
  std::vector<std::int64_t> counts_, before_;  ///< [rank]: microbatches of the next step; microbatches of the earlier
                                               ///< runs
};

}  // namespace tessera
