#include "engine/memory/brought_tensor_states.h"

#include <cstddef>
#include <span>
#include <utility>

namespace tessera {
namespace {

std::unique_ptr<SlotCarrier> stream_of(const MemoryPlan& plan, const TrainingMemory& memory, DeviceKernels* kernels) {
  if (!kernels) return nullptr;
  const RecordPool& pool = plan.tensor_state_records();
  // The slots of the batch that is on the GPU are not free for records ahead.
  const std::int64_t ahead = pool.device_slots - plan.tensor_states_of_a_batch();
  return make_slot_carrier(plan, memory.tensor_state_records, pool, memory.tensor_state_slots.data(), ahead, *kernels);
}

}  // namespace

BroughtTensorStates::BroughtTensorStates(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan,
                                         const TrainingMemory& memory, DeviceKernels* kernels)
    : units_(units), records_(memory.tensor_state_records), stream_(stream_of(plan, memory, kernels)) {
  // in the order of units
  for (std::int64_t record = 0; record < records_->records(); ++record) order_.push_back(record);
}

void BroughtTensorStates::begin() { carrier().announce(order_); }

/// Groups in unit order have records that follow each other.
void BroughtTensorStates::begin(const MatrixBatch& batch) {
  find_groups(batch);
  if (groups_.empty()) return;
  const auto first = static_cast<std::size_t>(groups_.front()->tensor_state_record);
  carrier().announce(std::span(order_).subspan(first, groups_.size()));
}

void BroughtTensorStates::end() { carrier().flush(); }

void BroughtTensorStates::find_groups(const MatrixBatch& batch) {
  groups_.clear();
  for (std::size_t unit = batch.begin_unit; unit < batch.end_unit; ++unit) {
    for (const auto& group : units_[unit]->groups) {
      if (group->tensor_state_record >= 0) groups_.push_back(group.get());
    }
  }
}

void BroughtTensorStates::with(const MatrixBatch& batch, c10::function_ref<void()> body) {
  find_groups(batch);
  if (groups_.empty()) return body();
  try {
    hold(body);
  } catch (...) {
    take_away();
    throw;
  }
  take_away();
}

void BroughtTensorStates::hold(c10::function_ref<void()> body) {
  std::vector<Lease> leases;
  for (FlatGroup* group : groups_) {
    leases.push_back(carrier().acquire(group->tensor_state_record, LeaseUse::kChange));
    group->tensor_state = reinterpret_cast<float*>(leases.back().bytes().data());
  }
  body();
  for (Lease& lease : leases) lease.give_back();
}

void BroughtTensorStates::take_away() {
  for (FlatGroup* group : groups_) group->tensor_state = nullptr;
}

}  // namespace tessera
