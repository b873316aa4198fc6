#include <map>
#include <string>
#include <utility>

#include "engine/activations/activation_tier.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

class NvmeActivations final : public ActivationTier {
 public:
  NvmeActivations(const OffloadConfig& offload, int rank) : spill_(activation_spill(offload, rank)) {}

  Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) override {
    const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
    const Id id = value_or_throw(spill_->put({data, bytes}));
    values_[id] = {bytes, phase_of(data)};
    counts_.add_put(bytes);
    return id;
  }

  StoredBytes get(Id id) override {
    const auto [bytes, phase] = values_.at(id);
    const at::Tensor memory = bytes_on(c10::Device(c10::kCPU), phase + bytes);
    throw_if_error(spill_->get(id, {static_cast<std::byte*>(memory.mutable_data_ptr()) + phase, bytes}));
    counts_.bytes_got += static_cast<std::int64_t>(bytes);
    return {memory.storage(), phase};
  }

  void drop(Id id) override {
    spill_->drop(id);
    const auto value = values_.find(id);
    counts_.drop(value->second.bytes);
    values_.erase(value);
  }

  ActivationCounts counts() const override { return with_disk(counts_, spill_->counters()); }
  std::int64_t memory_bytes() const override { return static_cast<std::int64_t>(spill_->memory_bytes()); }

 private:
  struct Value {
    std::size_t bytes = 0, phase = 0;
  };

  const std::unique_ptr<Spill> spill_;
  std::map<Id, Value> values_;
  ActivationCounts counts_;  ///< all counts except those of the disk, which the spill keeps
};

}  // namespace

std::unique_ptr<ActivationTier> nvme_activations(const OffloadConfig& offload, int rank) {
  return std::make_unique<NvmeActivations>(offload, rank);
}

std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank) {
  SpillOptions options;
  options.who = "rank " + std::to_string(rank) + " activations";
  options.directories = offload.paths;
  options.piece_bytes = static_cast<std::size_t>(offload.record_bytes);
  options.queue_depth = static_cast<int>(offload.queue_depth.value_or(kQueueDepth));
  options.verify = offload.verify;
  options.io.any_thread = true;  // any thread may destroy a graph and so call the spill while it transfers
  std::unique_ptr<Spill> spill = value_or_throw(Spill::create(std::move(options)));
  log_info("rank " + std::to_string(rank) + ": activations over " + spill->describe());
  return spill;
}

ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk) {
  counts.disk_bytes_read = disk.bytes_read;
  counts.disk_bytes_written = disk.bytes_written;
  counts.disk_wait_seconds = disk.wait_seconds;
  return counts;
}

}  // namespace tessera
