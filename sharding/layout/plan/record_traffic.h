#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/base/even_spread.h"
#include "sharding/layout/plan/step_program.h"

namespace tessera {

/// What steps move of records in files, counted for MemoryPlan by going through their programs.

/// Kinds of records.
enum class RecordKind : std::uint8_t { kParameters, kStates, kTensorStates, kGradients };

/// Records of one kind.
struct RecordList {
  std::vector<std::int64_t> bytes;  ///< of each
  /// [owners + 1]: the first record of each group that trains; of gradients that of each unit. Nobody visits what lies behind the last.
  std::vector<std::size_t> first = {0};

  /// The next owner has all records that were added since the one before.
  void end_owner() { first.push_back(bytes.size()); }
  /// Those that do not stay in memory.
  RecordList without(const EvenSpread& cached) const;
};

/// Some records one behind the other, or backward from the last to the first.
struct Stretch {
  std::size_t begin = 0, end = 0;
  bool backward = false;
};

/// Slots that keep the records which were used last, as a FileTier's do.
class RecordSlots {
 public:
  /// `bytes`: of each record.
  RecordSlots(std::span<const std::int64_t> bytes, std::int64_t slots);

  /// Goes through the stretches, in which no record is twice, and returns the bytes of those that no slot had. Slots can have
  /// only the first records of a pass, and have its last ones in the end. So it looks at those alone, and at slots^2 numbers
  /// at most, however many there are.
  std::int64_t go_through(std::span<const Stretch> stretches);
  /// What the records [begin, end) have together.
  std::int64_t bytes_of(std::size_t begin, std::size_t end) const { return before_[end] - before_[begin]; }

 private:
  std::int64_t use(std::size_t record);

  std::vector<std::int64_t> before_;  ///< [records + 1]: bytes of all records before
  const std::size_t slots_;
  std::vector<std::size_t> kept_;  ///< records, the one used last in the end
};

struct RecordMoves {
  std::int64_t read = 0, written = 0;  ///< bytes
};

/// What two steps in a row move, when many have gone before. `programs`: as of step_programs. `slots`: 0: nothing is found in memory.
RecordMoves moves_in_two_steps(std::span<const StepProgram> programs, RecordKind kind, const RecordList& records,
                               std::int64_t slots);

}  // namespace tessera
