#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/comm/collectives.h"
#include "sharding/reduce/reduce_setup.h"
#include "sharding/reduce/reduced_unit.h"
#include "sharding/unit_agreement.h"

namespace tessera {

/// Sends notes of this rank together with each unit's reduction, if units are updated in backward. The notes have the
/// parameters that the rank used, a digest of its actions so far, and the numbers of its microbatch (unit_notes).
/// Reducer owns a NotesExchange, and the thread that runs backward calls it.
class NotesExchange {
 public:
  /// Notes of one unit, while they are exchanged over the shard axis.
  struct Notes {
    std::span<float> values;  ///< SumPlan::notes_numel numbers, in memory of the plan
    std::vector<char> used;   ///< [trainable parameter of the unit]: whether this rank used the parameter; after `end`
                              ///< on the CPU, whether any rank used it
    Work work;
  };

  explicit NotesExchange(const ReduceSetup& setup) : setup_(setup) {}

  /// Sets the numbers that all notes of a microbatch have (Reducer::begin_round).
  void begin_round(std::uint64_t digest, double weight, std::int64_t samples) {
    digest_ = digest, weight_ = weight, samples_ = samples;
  }
  /// Writes the unit's notes and begins their exchange.
  void start(const ReducedUnit& unit, Notes& notes, Waits waits) const;
  /// Completes the exchange for the unit with this name. The result refers to `notes`.
  UnitAgreement end(const std::string& unit, Notes& notes) const;

 private:
  void write(const Notes& notes) const;

  const ReduceSetup setup_;
  std::uint64_t digest_ = 0;
  double weight_ = 0;
  std::int64_t samples_ = 0;
};

}  // namespace tessera
