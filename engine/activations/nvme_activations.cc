#include "engine/activations/nvme_activations.h"

#include "engine/activations/activation_spill.h"
#include "runtime/border/throw.h"

namespace tessera {

NvmeActivations::NvmeActivations(const OffloadConfig& offload, int rank) : spill_(activation_spill(offload, rank)) {}

ActivationTier::Id NvmeActivations::put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) {
  const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
  const Id id = value_or_throw(spill_->put({data, bytes}));
  values_[id] = {bytes, phase_of(data)};
  counts_.add_put(bytes);
  return id;
}

StoredBytes NvmeActivations::get(Id id) {
  const auto [bytes, phase] = values_.at(id);
  const at::Tensor memory = bytes_on(c10::Device(c10::kCPU), phase + bytes);
  throw_if_error(spill_->get(id, {static_cast<std::byte*>(memory.mutable_data_ptr()) + phase, bytes}));
  counts_.bytes_got += static_cast<std::int64_t>(bytes);
  return {memory.storage(), phase};
}

void NvmeActivations::drop(Id id) {
  spill_->drop(id);
  const auto value = values_.find(id);
  counts_.drop(value->second.bytes);
  values_.erase(value);
}

ActivationCounts NvmeActivations::counts() const { return with_disk(counts_, spill_->counters()); }

}  // namespace tessera
