#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "sharding/layout/plan/microbatch_order.h"

namespace tessera {

/// The times of a rank's work in a step, in seconds.
struct BackupRank {
  double first_s = 0;     ///< seconds before the rank's first forward, in which the rank is idle; 0 or more
  double forward_s = 0;   ///< seconds of the forward of one microbatch, 0 or more
  double backward_s = 0;  ///< seconds of the backward of one microbatch, 0 or more
  double microbatch_s() const { return forward_s + backward_s; }
};

/// A step whose ranks also compute microbatches of slower ranks.
struct BackupStep {
  /// [rank]: the seconds from the step's start until the rank has no microbatch left to compute. Ranks then wait for
  /// each other.
  std::vector<double> ends_s;
  std::int64_t made_again = 0;  ///< microbatches that another rank than their owner has completed first
  std::int64_t twice = 0;       ///< microbatches on which two ranks have spent time
};

/// Plays a step by the rules of "deal.backups" (engine/training/backup_claims.h), in which questions and messages take
/// no time. `order` has the runs of the ranks, and MicrobatchOrder::backups. If passes of several ranks end at the same
/// time, the rank with the lower number comes first. `tessera plan` and `tessera simulate` call it for each simulated
/// step. A call handles two events for each computed microbatch, and compares all ranks for each claim.
///
/// REQUIRES: order.has_runs, and one element of `ranks` for each rank.
BackupStep play_backups(const MicrobatchOrder& order, std::span<const BackupRank> ranks);

}  // namespace tessera
