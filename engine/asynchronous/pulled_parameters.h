#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/asynchronous/common_parameters.h"
#include "engine/asynchronous/host_copies.h"
#include "engine/asynchronous/push_order.h"
#include "runtime/base/metrics/latency_histogram.h"
#include "sharding/unit.h"
#include "tessera/strategy.h"

namespace tessera {

/// Common parameters of which each rank has a copy; the rank computes with this copy. A rank pulls a unit's newest
/// values at the first read since its last step, and no more than once a step. The class Pulls calls `pull`.
class PulledParameters : public PushedParameters {
 public:
  /// Keeps references to the last three arguments.
  PulledParameters(const std::vector<std::unique_ptr<Unit>>& units, PeerBoard& board, const AsynchronousConfig& config,
                   HostCopies& copies);

  /// Copies the newest values of a unit to this rank, unless this step has pulled them already. A rank that is
  /// more than max_staleness steps ahead of another rank waits first. Returns false if there was nothing to pull.
  bool pull(const Unit& unit);
  /// Copies the newest values of all units to this rank, for a module that outlives its Engine. Such a copy is not
  /// counted as a pull: recorded orders leave it out, and it does not wait for slow ranks. Other ranks may push during
  /// this call.
  virtual void take_newest() = 0;

  /// These return the number of units pulled so far, and the number of their bytes.
  std::int64_t pulls() const { return pulls_; }
  std::int64_t pulled_bytes() const { return pulled_bytes_; }
  /// Returns the seconds so far in pulls, including waits for slow ranks and for this rank's turns.
  double pull_seconds() const { return pull_seconds_; }
  /// Returns pull_seconds() plus the seconds in which pushes waited.
  double communication_seconds() const override { return pull_seconds_ + push_wait_seconds_; }
  PulledParameters* pulled() override { return this; }
  /// Returns this rank's copies of values and gradients in memory of the host.
  HostCopies& copies() { return copies_; }
  /// Measures, from now on, how long each unit's pulls take. `latencies` [unit] must outlive this object.
  void time_pulls(std::span<LatencyHistogram> latencies) { latencies_ = latencies; }

 protected:
  /// Copies a unit's newest values.
  virtual void pull_unit(const Unit& unit) = 0;
  void take_as_fresh(std::size_t unit) { is_fresh_[unit] = 1; }
  bool is_fresh(std::size_t unit) const { return is_fresh_[unit] != 0; }
  /// Counts this rank's step, and writes the order if it is recorded. The next step pulls units anew.
  void end_step_of_copies();
  /// Returns whether a rank waits for ranks that are more than max_staleness steps behind. No wait is needed if a
  /// recorded order is replayed: that order already contains the effect of such waits.
  bool bounds_staleness() const { return config_.max_staleness && !order_.is_played(); }

  const AsynchronousConfig& config_;
  HostCopies& copies_;
  PushOrder order_;  ///< shards are numbered by group, then by owner
  double pull_seconds_ = 0, push_wait_seconds_ = 0;
  std::vector<std::size_t> first_group_;  ///< [unit]: index of the unit's first trainable group; the last entry is the
                                          ///< number of all groups

 private:
  std::vector<char> is_fresh_;  ///< [unit]: whether the unit was pulled in this step
  std::int64_t pulls_ = 0, pulled_bytes_ = 0;
  std::span<LatencyHistogram> latencies_;  ///< empty: pulls are not timed
};

}  // namespace tessera
