#pragma once

// See docs/glossary.md: agreement, slot, unit.

#include <cstddef>
#include <span>
#include <vector>

namespace tessera {

class UseTimes;

/// Records the actions that all ranks must do in the same order between two steps: gathers, and Gathered guards. Ranks
/// compare digests of the log in every step's agreement (engine/step/agree/gather_order.h).
///
/// Entries are unit indices. A guard over unit u is `guard_code(u)`. If ranks make no gathers, a use of unit u is `u`.
/// If no step ends for a long time (evaluation), the log keeps only its latest entries, which are the same on every
/// rank.
class GatherLog {
 public:
  static constexpr int guard_code(int unit) { return -2 - unit; }

  /// `recent` is the number of units that ranks on several hosts would hold gathered at once (see `note_use`). The root
  /// unit, which has a separate slot, is not counted.
  explicit GatherLog(std::size_t recent) : most_recent_(recent) { recent_.reserve(recent); }

  /// `note_gather` is called when a unit is gathered, and `note_guard` when a guard over the unit begins.
  void note_gather(int unit) { add(unit); }
  void note_guard(int unit) { add(guard_code(unit)); }
  /// It is called when an operator reads a unit that every rank of this host can read without a gather. The use is
  /// noted if ranks on several hosts would have to gather the unit, because it is not among the units used last. The
  /// root unit (unit 0) is noted once in each step.
  void note_use(int unit);
  /// It is called when a gradient of the unit has arrived. The gradient is reported to the UseTimes of `time_uses`; the
  /// log gets no entry for it.
  void note_gradient(int unit);
  /// Reports every later `note_use` to `times` too; null ends the reports.
  void time_uses(UseTimes* times) { times_ = times; }

  std::span<const int> entries() const { return entries_; }
  /// Forgets all entries. It is called at the end of a step.
  void reset();

 private:
  void add(int entry);

  UseTimes* times_ = nullptr;
  std::vector<int> entries_;
  std::size_t most_recent_;
  std::vector<int> recent_;  ///< the units used last, without the root unit; the latest is at the end
  bool has_root_ = false;
};

}  // namespace tessera
