#pragma once

// See docs/glossary.md: unit.

#include <chrono>
#include <deque>
#include <span>
#include <vector>

#include "runtime/base/metrics/latency_histogram.h"
#include "runtime/comm/collectives.h"
#include "sharding/gather/unit_keeper.h"
#include "sharding/unit.h"

namespace tessera {

/// An asynchronous all-gather of updated values. It sends these values to the ranks of the shard axis that hold copies
/// of them, while the rest of the update and the next forward run. It needs a transport that makes gathers in the
/// background (Collectives::gathers_in_background).
///
/// The engine starts the gather of a group when the group has been updated. The group's storage refuses access until
/// all parts of the group have arrived, and the first operator that reads the group waits. Every rank begins the gather
/// in its own step, also if it does not read the group. So a single rank may also read a group.
class Publication final : public UnitKeeper {
 public:
  /// `form` is the codec on the wire, which must not be lossy.
  Publication(std::vector<Unit*> units, Collectives& group, WireForm form, OnFailure on_failure);
  /// Waits for all gathers under way. A group whose values did not arrive cannot be read afterwards.
  ~Publication();
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  /// Sends this rank's part of `group`, and receives the other ranks' parts. The call is collective. REQUIRES: no
  /// gather of the group is under way.
  void start(FlatGroup& group);
  /// Waits until all started gathers have ended.
  void finish();
  /// It is called in a forked process. Gathers under way never end in that process, so their units are poisoned.
  void give_up();

  void use(Unit& unit) override;
  void hold(Unit& unit) override { use(unit); }
  void drop(Unit& unit) override { finish(unit); }

  /// From now on, records in `latencies` how long each group's values take: from `start` until they have arrived and a
  /// caller has waited for them. `latencies` [unit] must outlive this object.
  void time_gathers(std::span<LatencyHistogram> latencies) { latencies_ = latencies; }

  /// Returns the seconds spent so far on starting and waiting.
  double seconds() const { return seconds_; }

 private:
  struct Coming {
    FlatGroup* group;
    std::byte* memory;
    Work work;
    std::chrono::steady_clock::time_point begun;  ///< the default value if gathers are not timed
  };
  void finish(const Unit& unit);

  const std::vector<Unit*> units_;
  Collectives& group_;
  const WireForm form_;
  std::deque<Coming> coming_;  ///< ordered by their starts
  bool is_forked_ = false;
  double seconds_ = 0;
  std::span<LatencyHistogram> latencies_;  ///< empty if gathers are not timed
};

}  // namespace tessera
