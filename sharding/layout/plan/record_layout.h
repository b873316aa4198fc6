#pragma once

#include <array>
#include <cstdint>

#include "runtime/base/state_dtype.h"
#include "sharding/layout/chunks.h"

namespace tessera {

/// The state of each element that a rank's optimizer updates, and the fraction of this state that is offloaded.
struct TieredState {
  std::int64_t master_bytes = 0;  ///< bytes of an element's master that are not in the parameter: 0, 2 (low halves) or
                                  ///< 4
  StateFormats states = {};       ///< formats of the numbers that the optimizer keeps
  double masters_below = 0, states_below = 0;  ///< the fractions that are offloaded, 0 to 1
  std::int64_t record_bytes = 2 << 20;         ///< a record's upper limit in bytes; at least a page
};

/// The division of the masters and optimizer states of one group's optimizer part into records. A step reads or writes
/// each record with one operation. A RecordLayout consists of integers.
///
/// The first chunks of each kind of state are in memory, and the rest are offloaded. An offloaded chunk has the record
///
///   [masters | numbers of state 0 | scales of state 0 | numbers of state 1 | ...]
///
/// The record has only the pieces that are offloaded. Each piece begins on a cache line, and the record is padded to
/// whole pages.
class RecordLayout : public Chunks {
 public:
  RecordLayout() = default;
  RecordLayout(std::int64_t numel, const TieredState& state);

  const TieredState& state() const { return state_; }
  /// These functions return the number of elements, counted from the part's first element, whose masters (or states)
  /// are in memory.
  std::int64_t masters_in_memory() const { return numel_before(first_master_); }
  std::int64_t states_in_memory() const { return numel_before(first_state_); }

  /// Returns whether each record has both the masters and the states of its elements, as far as these exist.
  bool are_whole() const;

  /// A piece of a record: its masters, or the numbers or the scales of one state. `bytes` is 0 if the chunk keeps this
  /// state in memory, or does not have this state.
  struct Piece {
    std::int64_t offset = 0, bytes = 0;
  };
  struct Record {
    std::int64_t bytes = 0;  ///< a multiple of the page size
    Piece masters;
    struct State {
      Piece numbers, scales;
    };
    std::array<State, kMostStates> states{};
  };
  /// Returns the record of a chunk. REQUIRES: chunk >= first_record().
  Record record(std::int64_t chunk) const;

 private:
  TieredState state_;
  std::int64_t first_master_ = 0, first_state_ = 0;  ///< index of the first offloaded chunk of each kind
};

}  // namespace tessera
