#include "engine/activations/device_nvme_activations.h"

#include <iterator>
#include <utility>

#include "engine/activations/activation_spill.h"
#include "runtime/border/throw.h"

namespace tessera {

DeviceNvmeActivations::DeviceNvmeActivations(ComputeDevice device, DeviceKernels& kernels, const OffloadConfig& offload,
                                             int rank)
    : device_(device),
      kernels_(&kernels),
      queue_depth_(static_cast<std::size_t>(offload.queue_depth.value_or(kQueueDepth))),
      spill_(activation_spill(offload, rank)),
      idle_(kernels, rank) {}

DeviceNvmeActivations::~DeviceNvmeActivations() = default;

/// Returns a block that the host may write now: its last copy is over.
PinnedBlocks::Block DeviceNvmeActivations::idle_block(std::size_t bytes) {
  PinnedBlocks::Block block = idle_.take(bytes);
  if (block.last) std::exchange(block.last, nullptr)->wait();
  return block;
}

ActivationTier::Id DeviceNvmeActivations::put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) {
  const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
  const Id id = next_++;
  Value& value = values_[id];
  value.bytes = bytes;
  value.phase = phase_of(data);
  value.block = idle_block(bytes);
  value.leaving = {storage, begin};
  value.block.last = kernels_->download(value.block.memory.get(), data, bytes);
  leaving_.push_back(id);
  while (leaving_.size() > queue_depth_) spill_oldest();
  counts_.add_put(bytes);
  return id;
}

/// Puts the oldest value on its way out into the spill. It waits for the copy to the host first, so nothing that is
/// computed later has to be ordered after that copy.
void DeviceNvmeActivations::spill_oldest() {
  Value& value = values_.at(leaving_.front());
  value.block.last->wait();
  leaving_.pop_front();
  value.leaving = {};
  value.block.last = nullptr;
  PinnedBlocks::Block block = std::exchange(value.block, {});
  value.spilled = value_or_throw(spill_->put({block.memory.get(), value.bytes}));
  idle_.give_back(std::move(block));
}

/// Throws where the value is not in the spill: putting it there failed, and that error was reported then.
void DeviceNvmeActivations::expect_spilled(const Value& value) {
  if (!value.spilled)
    throw Error(ExitCode::kIo, "an activation could not be put on disk. [T0087] hint: an earlier message says why");
}

/// Begins to bring the value back: reads it from the spill and queues its copy to the device.
void DeviceNvmeActivations::bring_back(Value& value) {
  expect_spilled(value);
  value.block = idle_block(value.bytes);
  throw_if_error(spill_->get(*value.spilled, {value.block.memory.get(), value.bytes}));
  const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
  const DeviceKernels::UploadPiece piece[] = {
      {static_cast<std::byte*>(memory.mutable_data_ptr()) + value.phase, value.block.memory.get(), value.bytes}};
  // The copy comes after work that still uses the memory that the allocator has just given out.
  const std::unique_ptr<DeviceKernels::Mark> now = kernels_->mark();
  value.block.last = kernels_->upload(piece, now.get());
  value.coming = {memory.storage(), value.phase};
}

/// Makes later computation wait for the copy back, and returns the value's place.
StoredBytes DeviceNvmeActivations::take(Value& value) {
  value.block.last->join();
  idle_.give_back(std::exchange(value.block, {}));
  return std::exchange(value.coming, {});
}

StoredBytes DeviceNvmeActivations::get(Id id) {
  const auto found = values_.find(id);
  Value& value = found->second;
  counts_.bytes_got += static_cast<std::int64_t>(value.bytes);
  if (value.leaving.storage) return value.leaving;
  if (!kernels_) {
    expect_spilled(value);
    const at::Tensor on_host = bytes_on(c10::Device(c10::kCPU), value.phase + value.bytes);
    auto* const data = static_cast<std::byte*>(on_host.mutable_data_ptr()) + value.phase;
    throw_if_error(spill_->get(*value.spilled, {data, value.bytes}));
    const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
    memory.copy_(on_host);
    return {memory.storage(), value.phase};
  }
  if (!value.coming.storage) bring_back(value);
  const StoredBytes bytes = take(value);
  if (found != values_.begin()) {
    Value& before = std::prev(found)->second;
    if (before.spilled && !before.coming.storage) bring_back(before);
  }
  return bytes;
}

void DeviceNvmeActivations::drop(Id id) {
  const auto found = values_.find(id);
  Value& value = found->second;
  std::erase(leaving_, id);
  if (value.leaving.storage) {  // later work in its memory must come after the copy
    value.block.last->join();
    idle_.give_back(std::exchange(value.block, {}));
  }
  if (value.coming.storage) take(value);
  if (value.spilled) spill_->drop(*value.spilled);
  counts_.drop(value.bytes);
  values_.erase(found);
}

void DeviceNvmeActivations::close() {
  kernels_ = nullptr;
  while (!leaving_.empty()) spill_oldest();
  for (auto& [id, value] : values_) {
    if (!value.coming.storage) continue;
    value.block.last->wait();
    value.block = {};
    value.coming = {};
  }
  idle_.clear();
}

ActivationCounts DeviceNvmeActivations::counts() const { return with_disk(counts_, spill_->counters()); }

}  // namespace tessera
