#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

class UseTimes;

/// What ranks must do alike between two steps: the order of gathers, and of Gathered guards. Ranks compare digests of it in
/// every step's agreement (engine/step/agree/gather_order.h).
///
/// Entries are unit indices; a guard over unit u is `guard_code(u)`, a unit's use where nothing is gathered `u`. Of a log
/// without end (evaluation) the last entries are kept, from the same on for every rank.
class GatherLog {
 public:
  static constexpr int guard_code(int unit) { return -2 - unit; }

  /// `recent`: how many units beside the root, which has a slot of its own, several hosts would hold gathered at once (see
  /// `note_use`).
  explicit GatherLog(std::size_t recent) : most_recent_(recent) { recent_.reserve(recent); }

  void note_gather(int unit) { add(unit); }
  void note_guard(int unit) { add(guard_code(unit)); }
  /// An operator reads a unit that every rank of this host has at hand. Noted if ranks on several hosts would have to
  /// gather it: it is not among the last ones used. The root (unit 0) is noted once a step.
  void note_use(int unit);
  /// A gradient of the unit is there. Noted for `time_uses` alone.
  void note_gradient(int unit);
  /// Tells every `note_use` to `times` too, from now on; null: no more.
  void time_uses(UseTimes* times) { times_ = times; }

  std::span<const int> entries() const { return entries_; }
  /// A step is over.
  void reset();

 private:
  void add(int entry);

  UseTimes* times_ = nullptr;
  std::vector<int> entries_;
  std::size_t most_recent_;
  std::vector<int> recent_;  ///< the last units used, without the root; the latest at the end
  bool has_root_ = false;
};

}  // namespace tessera
