#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/plan/microbatch_order.h"
#include "tessera/strategy.h"

namespace tessera {

/// Deals a step's microbatches to ranks in runs of neighbours, as many to each as its speed allows, so that all end
/// together ("deal" by speed). Speeds are those of a window of steps: a rank's median of the seconds for which it was
/// busy (LocalStep::busy_seconds), divided by its microbatches. Training tells it what ranks agreed on at a step's end,
/// so all of them decide alike, and no collective is needed. A deal that would make the step less than 3 % shorter is
/// not worth the change. One thread at a time uses it; all memory is allocated at construction.
class MicrobatchDealer {
 public:
  /// Begins with even runs. REQUIRES: deal.by is kSpeed, ranks > 1.
  MicrobatchDealer(const Strategy& strategy, int ranks);

  /// Returns the runs of the next step.
  const MicrobatchOrder& order() const { return order_; }
  /// Adds a step: `busy_seconds` [rank]. Returns whether `order` has changed. `computed` [rank]: the microbatches on
  /// which the seconds were spent ("deal.backups"); empty: those of the runs.
  bool add(std::span<const double> busy_seconds, std::span<const std::int64_t> computed = {});

 private:
  MicrobatchOrder order_;
  const std::size_t window_;
  std::vector<std::vector<double>> busy_;      ///< [rank][step of this window]: seconds of one microbatch
  std::vector<double> seconds_;                ///< [rank]: seconds of one microbatch
  std::vector<std::int64_t> counts_, before_;  ///< [rank]: microbatches of the next step, and of the runs before
};

}  // namespace tessera
