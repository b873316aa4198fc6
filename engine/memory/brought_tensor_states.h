#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/memory/records/state_records.h"
#include "engine/memory/records/state_stream.h"
#include "engine/memory/training_memory.h"
#include "sharding/layout/matrix_deal.h"
#include "sharding/unit.h"

namespace tessera {

/// States of whole tensors that lie below memory, brought to where the exchange of a batch finds them: meanwhile FlatGroup::tensor_state is
/// there. On the CPU that is the records' own memory. On a GPU it is a slot of its memory, and what is done there is queued.
class BroughtTensorStates {
 public:
  /// `kernels`: of the GPU that trains; null on the CPU. All outlive this. REQUIRES: memory.tensor_state_records.
  BroughtTensorStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                      const TrainingMemory& memory, DeviceKernels* kernels);

  /// All batches of a step will come, in order: the first records are read ahead. Twice is as once, until one has come.
  void begin();
  /// Calls `body` with the batch's states there, and takes back what it made of them. Throws as StateRecords::visit, and what `body` throws.
  void with(const MatrixBatch& batch, c10::function_ref<void()> body);
  void end();

  std::int64_t streamed_bytes() const { return stream_ ? stream_->streamed_bytes() : 0; }

 private:
  void pass_through(c10::function_ref<void()> body);
  void hold(c10::function_ref<void()> body);
  void take_away();

  const std::vector<std::unique_ptr<Unit>>& units_;
  const std::shared_ptr<StateRecords> records_;
  std::unique_ptr<StateStream> stream_;  ///< null on the CPU
  std::vector<std::int64_t> order_;      ///< of a step
  std::vector<FlatGroup*> groups_;       ///< of a batch
};

}  // namespace tessera
