#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/replay/find_nonfinite.h"
#include "engine/replay/replay_request.h"
#include "engine/replay/step_records.h"
#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/unit.h"
#include "tessera/engine.h"

namespace tessera {

/// The world ranks whose parts together make up all gradients, and all masters, each part once.
struct OwnersOfParts {
  std::vector<int> gradients, masters;
};

/// Records a step's hashes ("record_hashes"), or makes steps again and compares them (TESSERA_REPLAY). CpuStep owns a
/// StepRecorder and calls it from the thread that trains.
///
/// A step that is recorded reads this rank's gradients and masters once more, in two separate passes. The pass that
/// computes the norm cannot do this: it sees the sums of every round, and only the last sums are recorded. New masters
/// are complete only when the step has ended. By then the step's own exchange has ended too, so there is one more
/// all-gather, in which each rank sends 16 bytes for each unit. Steps that are not recorded cost nothing.
///
/// In a replay, rank 0 prints a line for each step, up to the last step of the request.
class StepRecorder {
 public:
  /// Returns null if the run neither records nor replays steps. Throws tessera::Error where rank 0 cannot make the file
  /// (73, 77, 71, 74, 65), and the errors of read_step_records.
  static std::unique_ptr<StepRecorder> make(const Strategy& strategy, const std::vector<std::unique_ptr<Unit>>& units,
                                            Collectives& world, OwnersOfParts owners);

  /// Tells the recorder that ranks have the microbatches of `order` from the next step on.
  void deal(const MicrobatchOrder& order) { order_ = order; }
  /// It is called when a backward of this rank's `round`-th microbatch has ended.
  void end_backward(const at::Tensor& loss, std::int64_t round);
  /// It is called in place of `end_backward` for a microbatch that does not count. The results of such a microbatch are
  /// not reported, even if they are not finite.
  void pass_over_backward();
  /// It is called when the step's microbatches until now are dropped (Engine::zero_grad).
  void drop_microbatches() { found_.reset(); }
  /// It is called after ranks have agreed, before the update of step `step`. If a replay looks for results that are not
  /// finite, the call is collective up to the last step of the request. Throws tessera::Error (65), on one rank, if a
  /// result is not finite.
  void begin_update(std::int64_t step);
  /// It is called at the end of a step. It is collective if the step is recorded. Throws tessera::Error: 65 if a
  /// replayed step differs from its record; 64 if a search for a divergence compared no step.
  void end_step(const StepResult& result);

 private:
  StepRecorder(const Strategy& strategy, const std::vector<std::unique_ptr<Unit>>& units, Collectives& world,
               OwnersOfParts owners, std::optional<ReplayRequest> replay);
  struct Found {
    std::int64_t microbatch;
    NonfiniteResult result;
  };
  bool is_due(std::int64_t step) const;
  void name_first(const std::optional<Found>& found, std::int64_t step);
  StepRecord record_of(const StepResult& result);
  void replay(const StepRecord& made);
  const StepRecord* recorded(std::int64_t step) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  Collectives& world_;
  const OwnersOfParts owners_;
  MicrobatchOrder order_;
  const std::int64_t every_;
  const std::optional<ReplayRequest> replay_;
  std::optional<StepRecordsFile> file_;   ///< set only on rank 0, and only if steps are recorded
  std::vector<StepRecord> recorded_;      ///< in a replay: the records of ReplayRequest::hashes, by step
  bool has_compared_ = false;             ///< whether a replay has compared a step with its record
  std::optional<FindNonfinite> watch_;    ///< set in a replay that looks for results that are not finite
  std::optional<Found> found_;            ///< this rank's first bad microbatch of the step under way
  std::vector<std::uint64_t> own_, all_;  ///< [gradients, masters][unit]: hashes of this rank; hashes of all ranks
};

}  // namespace tessera
