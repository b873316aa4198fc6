#pragma once

// See docs/glossary.md: slot, unit.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/even_spread.h"
#include "sharding/layout/plan/step_program.h"

namespace tessera {

/// MemoryPlan calls these functions. They go through the programs of steps, and count the bytes that steps read from
/// records in files and write to them.

/// The kinds of records.
enum class RecordKind : std::uint8_t { kParameters, kStates, kTensorStates, kGradients };

/// The records of one kind.
struct RecordList {
  std::vector<std::int64_t> bytes;  ///< size of each record
  /// [owners + 1]: the first record of each owner. An owner is a group that trains, or a unit in the case of gradients
  /// and tensor states. The last entry is the number of records, so no visit goes beyond it.
  std::vector<std::size_t> first = {0};

  /// Completes an owner: all records that were added since the last call belong to this owner.
  void end_owner() { first.push_back(bytes.size()); }
  /// Returns the list of the records that do not stay in memory.
  RecordList without(const EvenSpread& cached) const;
};

/// A range of records, which are used in order, or backward from the last to the first.
struct Stretch {
  std::size_t begin = 0, end = 0;
  bool backward = false;
};

/// The slots of a FileTier, which keep the records that were used last.
class RecordSlots {
 public:
  /// `bytes` has the size of each record.
  RecordSlots(std::span<const std::int64_t> bytes, std::int64_t slots);

  /// Uses the records of the stretches, in which no record occurs twice. Returns the bytes of the records that were in
  /// no slot. Only the first records of a pass, as many as there are slots, can be in slots from earlier passes. When
  /// the pass ends, the slots hold its last records. The search therefore looks only at these records. It compares at
  /// most slots^2 numbers, however many records there are.
  std::int64_t go_through(std::span<const Stretch> stretches);
  /// Returns the bytes of the records [begin, end) together.
  std::int64_t bytes_of(std::size_t begin, std::size_t end) const { return before_[end] - before_[begin]; }

 private:
  std::int64_t use(std::size_t record);

  std::vector<std::int64_t> before_;  ///< [records + 1]: total bytes of all records before each record
  const std::size_t slots_;
  std::vector<std::size_t> kept_;  ///< records in the slots; the one used last is at the end
};

/// Bytes that move between files and slots.
struct RecordMoves {
  std::int64_t read = 0, written = 0;  ///< bytes
};

/// Returns the bytes that two steps in a row move after many earlier steps. `programs` is the result of step_programs.
/// If `slots` is 0, no record is found in memory.
RecordMoves moves_in_two_steps(std::span<const StepProgram> programs, RecordKind kind, const RecordList& records,
                               std::int64_t slots);

}  // namespace tessera
