#include "engine/activations/nvme_activations.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <string>
#include <utility>

#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {

NvmeActivations::NvmeActivations(const OffloadConfig& offload, int rank) {
  SpillOptions options;
  options.who = "rank " + std::to_string(rank) + " activations";
  options.directories = offload.paths;
  options.piece_bytes = static_cast<std::size_t>(offload.record_bytes);
  options.queue_depth = static_cast<int>(offload.queue_depth);
  options.verify = offload.verify;
  options.io.any_thread = true;  // graphs go on whatever thread lets go of them
  spill_ = value_or_throw(Spill::create(std::move(options)));
  log_info("rank " + std::to_string(rank) + ": activations over " + spill_->describe());
}

ActivationTier::Id NvmeActivations::put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) {
  const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
  const Id id = value_or_throw(spill_->put({data, bytes}));
  values_[id] = {bytes, phase_of(data)};
  ++counts_.values;
  counts_.bytes_put += static_cast<std::int64_t>(bytes);
  counts_.live_bytes += static_cast<std::int64_t>(bytes);
  counts_.peak_bytes = std::max(counts_.peak_bytes, counts_.live_bytes);
  return id;
}

StoredBytes NvmeActivations::get(Id id) {
  const auto [bytes, phase] = values_.at(id);
  const at::Tensor memory = at::empty({static_cast<std::int64_t>(phase + bytes)}, at::kByte);
  throw_if_error(spill_->get(id, {static_cast<std::byte*>(memory.mutable_data_ptr()) + phase, bytes}));
  counts_.bytes_got += static_cast<std::int64_t>(bytes);
  return {memory.storage(), phase};
}

void NvmeActivations::drop(Id id) {
  spill_->drop(id);
  const auto value = values_.find(id);
  counts_.live_bytes -= static_cast<std::int64_t>(value->second.bytes);
  values_.erase(value);
}

ActivationCounts NvmeActivations::counts() const {
  ActivationCounts counts = counts_;
  const TierCounters disk = spill_->counters();
  counts.disk_bytes_read = disk.bytes_read;
  counts.disk_bytes_written = disk.bytes_written;
  counts.disk_wait_seconds = disk.wait_seconds;
  return counts;
}

}  // namespace tessera
