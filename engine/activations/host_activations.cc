#include "engine/activations/host_activations.h"

#include <ATen/ops/from_blob.h>

#include <utility>

namespace tessera {
HostActivations::HostActivations(ComputeDevice device, DeviceKernels& kernels, std::size_t queue_depth, int rank)
    : device_(device), kernels_(&kernels), queue_depth_(queue_depth), idle_(kernels, rank) {}

HostActivations::~HostActivations() = default;

ActivationTier::Id HostActivations::put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) {
  const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
  const Id id = next_++;
  Value& value = values_[id];
  value = {
      .block = idle_.take(bytes), .bytes = bytes, .phase = phase_of(data), .leaving = {storage, begin}, .coming = {}};
  value.block.last = kernels_->download(value.block.memory.get(), data, bytes);
  leaving_.push_back(id);
  while (leaving_.size() > queue_depth_) {
    let_go(values_.at(leaving_.front()));
    leaving_.pop_front();
  }
  counts_.add_put(bytes);
  return id;
}

/// Releases the device memory that a copy uses. Later computation waits for that copy.
void HostActivations::let_go(Value& value) {
  if (value.leaving.storage || value.coming.storage) value.block.last->join();
  value.leaving = {};
  value.coming = {};
}

/// Begins to bring the value back to the device. REQUIRES: no copy of it is under way.
void HostActivations::bring_back(Value& value) {
  const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
  value.coming = {memory.storage(), value.phase};
  const DeviceKernels::UploadPiece piece[] = {
      {static_cast<std::byte*>(memory.mutable_data_ptr()) + value.phase, value.block.memory.get(), value.bytes}};
  // The copy comes after work that still uses the memory that the allocator has just given out, and after the copy
  // out, which was joined.
  const std::unique_ptr<DeviceKernels::Mark> now = kernels_->mark();
  value.block.last = kernels_->upload(piece, now.get());
}

StoredBytes HostActivations::get(Id id) {
  const auto found = values_.find(id);
  Value& value = found->second;
  counts_.bytes_got += static_cast<std::int64_t>(value.bytes);
  if (!kernels_) {
    const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
    memory.narrow(0, static_cast<std::int64_t>(value.phase), static_cast<std::int64_t>(value.bytes))
        .copy_(at::from_blob(value.block.memory.get(), {static_cast<std::int64_t>(value.bytes)}, at::kByte));
    return {memory.storage(), value.phase};
  }
  if (!value.leaving.storage && !value.coming.storage) bring_back(value);
  auto before = found;
  for (std::size_t i = 0; i < queue_depth_ && before != values_.begin(); ++i) {
    --before;
    if (!before->second.leaving.storage && !before->second.coming.storage) bring_back(before->second);
  }
  if (value.leaving.storage) return value.leaving;
  const StoredBytes bytes = value.coming;
  let_go(value);
  return bytes;
}

void HostActivations::drop(Id id) {
  const auto found = values_.find(id);
  Value& value = found->second;
  std::erase(leaving_, id);
  counts_.drop(value.bytes);
  if (kernels_) {
    let_go(value);
    idle_.give_back(std::move(value.block));
  }
  values_.erase(found);
}

void HostActivations::close() {
  for (auto& [id, value] : values_) {
    value.block.last->wait();
    value.leaving = {};
    value.coming = {};
  }
  leaving_.clear();
  idle_.clear();
  kernels_ = nullptr;
}

}  // namespace tessera
