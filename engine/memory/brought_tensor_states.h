#pragma once

// See docs/glossary.md: carrier, slot, unit.

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/memory/records/slot_carrier.h"
#include "engine/memory/records/tier_carrier.h"
#include "engine/memory/training_memory.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/unit.h"

namespace tessera {

/// Brings the states of whole tensors that are offloaded to memory while the step exchanges a batch of matrices, and
/// takes them back. FlatGroup::tensor_state points at them meanwhile. The CPU's lie in the records' own memory.
/// On a GPU they lie in slots of its memory, and work on them is queued. The step owns one; only the thread of the step
/// calls it.
class BroughtTensorStates {
 public:
  /// `kernels`: those of the GPU that trains; null on the CPU. All arguments must outlive this object. REQUIRES:
  /// memory.tensor_state_records is not null.
  BroughtTensorStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                      const TrainingMemory& memory, DeviceKernels* kernels);

  /// Announces that all batches of a step will come, in order, so that the first records are read ahead. A second call
  /// before the first batch changes nothing.
  void begin();
  /// Does the same for one batch alone, if units are updated in backward.
  void begin(const MatrixBatch& batch);
  /// Calls `body` while the batch's states are in memory, and stores the changed states. Throws what
  /// Carrier::acquire throws, and what `body` throws.
  void with(const MatrixBatch& batch, c10::function_ref<void()> body);
  /// Ends the pass over the batches of a step.
  void end();

  std::int64_t streamed_bytes() const { return stream_ ? stream_->uploaded_bytes() : 0; }

 private:
  Carrier& carrier() const { return stream_ ? static_cast<Carrier&>(*stream_) : *records_; }
  void find_groups(const MatrixBatch& batch);
  void hold(c10::function_ref<void()> body);
  void take_away();

  const std::vector<std::unique_ptr<Unit>>& units_;
  const std::shared_ptr<TierCarrier> records_;
  std::unique_ptr<SlotCarrier> stream_;  ///< null on the CPU
  std::vector<std::int64_t> order_;      ///< the records of a step, in the order in which batches use them
  std::vector<FlatGroup*> groups_;       ///< the groups of the present batch whose states are in records
};

}  // namespace tessera
