#include <ATen/ops/from_blob.h>

#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "engine/activations/activation_tier.h"
#include "engine/device/pinned_memory.h"
#include "offload/files/aligned_memory.h"
#include "optim/device_kernels.h"
#include "runtime/border/throw.h"
#include "sharding/compute_device.h"

namespace tessera {

// This file keeps activations of a GPU in pinned memory of its host, or on a disk behind that memory.
//
// `put` queues a copy into a block of pinned memory, and holds the device's memory until the copy is over or ordered.
// At most `queue_depth` values are on their way out; `end_oldest` ends one of them. `get` brings a value back
// (`copy_back`). It also begins to bring back values that were put before this one, which backward needs next. A value
// on the disk has a block only while it is copied (DeviceNvmeActivations). No kernels are used after `close`.

namespace {

/// Pinned memory of a host for values of any length. A block is allocated when it is needed, and used again for values
/// that are not larger. A loop with the same sizes in each step therefore allocates no more blocks. One thread at a
/// time uses it.
class PinnedBlocks {
 public:
  /// A block of pinned memory, and its last copy in either direction (null if there was none, or if it was waited for).
  struct Block {
    std::shared_ptr<std::byte> memory;
    std::size_t bytes = 0;
    std::shared_ptr<DeviceKernels::Mark> last;
  };

  PinnedBlocks(DeviceKernels& kernels, int rank)
      : give_(pinned_memory_of(kernels, rank, "activations",
                               "a higher offload.activations.min, fewer samples a microbatch, or recomputation needs "
                               "less of it; so does the tier \"nvme\"")) {}

  /// Takes the smallest free block that is large enough, or a new one of `bytes` bytes. The last copy of the block may
  /// still be under way. Throws tessera::Error (71) if the host does not have that much pinned memory. REQUIRES: the
  /// kernels still exist.
  Block take(std::size_t bytes) {
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      if (block->bytes < bytes) continue;
      if (best == idle_.end() || block->bytes < best->bytes) best = block;
    }
    if (best == idle_.end()) return {give_(bytes), bytes, nullptr};
    Block block = std::move(*best);
    idle_.erase(best);
    return block;
  }
  void give_back(Block block) { idle_.push_back(std::move(block)); }
  /// Waits for the copies of the blocks that are not in use, and frees their memory.
  void clear() {
    for (const Block& block : idle_) {
      if (block.last) block.last->wait();
    }
    idle_.clear();
  }

 private:
  const AlignedMemory::Give give_;
  std::vector<Block> idle_;
};

/// Does the work that both tiers have in common: a value is copied out to a block of pinned memory, and is copied back
/// from a block.
class DeviceActivations : public ActivationTier {
 public:
  DeviceActivations(const Accelerator& accelerator, const OffloadConfig& offload, int rank)
      : device_(accelerator.device),
        kernels_(accelerator.kernels.get()),
        queue_depth_(static_cast<std::size_t>(offload.queue_depth.value_or(kQueueDepth))),
        idle_(*kernels_, rank) {}

  Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) final {
    const std::byte* const data = static_cast<const std::byte*>(storage.data()) + begin;
    PinnedBlocks::Block block = idle_block(bytes);
    block.last = kernels_->download(block.memory.get(), data, bytes);
    const Id id = next_++;
    values_.emplace(id, Value{bytes, phase_of(data), std::move(block), {storage, begin}, {}, std::nullopt});
    leaving_.push_back(id);
    while (leaving_.size() > queue_depth_) end_oldest();
    counts_.add_put(bytes);
    return id;
  }
  ActivationCounts counts() const override { return counts_; }

 protected:
  struct Value {
    std::size_t bytes = 0, phase = 0;
    PinnedBlocks::Block block;
    StoredBytes leaving;               ///< device memory that is being copied to the host; the copy was neither joined
                                       ///< nor waited for
    StoredBytes coming;                ///< device memory to which the value is being copied back; the copy was not
                                       ///< joined yet
    std::optional<Spill::Id> spilled;  ///< id of the value in the spill; empty while it is being copied to the host
  };

  /// Takes a block for a copy in either direction.
  virtual PinnedBlocks::Block idle_block(std::size_t bytes) { return idle_.take(bytes); }
  /// Completes the oldest copy to the host, so that its device memory can be freed.
  virtual void end_oldest() = 0;

  /// Begins to copy the value from its block to the device. REQUIRES: no copy of it is under way.
  void copy_back(Value& value) {
    const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
    const DeviceKernels::UploadPiece piece[] = {
        {static_cast<std::byte*>(memory.mutable_data_ptr()) + value.phase, value.block.memory.get(), value.bytes}};
    // The copy waits for work that still uses the newly allocated memory, and for earlier copies to the host, which
    // this stream has joined.
    const std::unique_ptr<DeviceKernels::Mark> now = kernels_->mark();
    value.block.last = kernels_->upload(piece, now.get());
    value.coming = {memory.storage(), value.phase};
  }

  const ComputeDevice device_;
  DeviceKernels* kernels_;  ///< null after `close`
  const std::size_t queue_depth_;
  std::map<Id, Value> values_;
  std::deque<Id> leaving_;  ///< values whose copy to the host was not completed yet, oldest first
  PinnedBlocks idle_;
  ActivationCounts counts_;  ///< all counts except those of a disk, which the spill keeps

 private:
  Id next_ = 0;
};

/// Before a block becomes free, the current stream joins the block's last copy. So every copy that is queued later
/// comes after that copy.
class HostActivations final : public DeviceActivations {
 public:
  using DeviceActivations::DeviceActivations;

  StoredBytes get(Id id) override {
    const auto found = values_.find(id);
    Value& value = found->second;
    counts_.bytes_got += static_cast<std::int64_t>(value.bytes);
    if (!kernels_) {
      const at::Tensor memory = bytes_on(device_.device, value.phase + value.bytes);
      memory.narrow(0, static_cast<std::int64_t>(value.phase), static_cast<std::int64_t>(value.bytes))
          .copy_(at::from_blob(value.block.memory.get(), {static_cast<std::int64_t>(value.bytes)}, at::kByte));
      return {memory.storage(), value.phase};
    }
    if (!value.leaving.storage && !value.coming.storage) copy_back(value);
    auto before = found;
    for (std::size_t i = 0; i < queue_depth_ && before != values_.begin(); ++i) {
      --before;
      if (!before->second.leaving.storage && !before->second.coming.storage) copy_back(before->second);
    }
    if (value.leaving.storage) return value.leaving;
    const StoredBytes bytes = value.coming;
    let_go(value);
    return bytes;
  }

  void drop(Id id) override {
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

  std::int64_t memory_bytes() const override { return 0; }

  /// Waits for the copies under way.
  void close() override {
    for (auto& [id, value] : values_) {
      value.block.last->wait();
      value.leaving = {};
      value.coming = {};
    }
    leaving_.clear();
    idle_.clear();
    kernels_ = nullptr;
  }

 private:
  void end_oldest() override {
    let_go(values_.at(leaving_.front()));
    leaving_.pop_front();
  }

  /// Releases the device memory that a copy uses. Later computation waits for that copy.
  static void let_go(Value& value) {
    if (value.leaving.storage || value.coming.storage) value.block.last->join();
    value.leaving = {};
    value.coming = {};
  }
};

/// A value has a block while a copy of it is under way.
class DeviceNvmeActivations final : public DeviceActivations {
 public:
  DeviceNvmeActivations(const Accelerator& accelerator, const OffloadConfig& offload, int rank)
      : DeviceActivations(accelerator, offload, rank), spill_(activation_spill(offload, rank)) {}

  StoredBytes get(Id id) override {
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

  void drop(Id id) override {
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

  ActivationCounts counts() const override { return with_disk(counts_, spill_->counters()); }
  std::int64_t memory_bytes() const override { return static_cast<std::int64_t>(spill_->memory_bytes()); }

  /// Waits for the copies under way, and puts values that were on their way out into the spill.
  void close() override {
    kernels_ = nullptr;
    while (!leaving_.empty()) end_oldest();
    for (auto& [id, value] : values_) {
      if (!value.coming.storage) continue;
      value.block.last->wait();
      value.block = {};
      value.coming = {};
    }
    idle_.clear();
  }

 private:
  /// Returns a block that the host may write now: its last copy has ended.
  PinnedBlocks::Block idle_block(std::size_t bytes) override {
    PinnedBlocks::Block block = idle_.take(bytes);
    if (block.last) std::exchange(block.last, nullptr)->wait();
    return block;
  }

  /// Puts the oldest value that is being copied to the host into the spill. It waits for the copy to the host first, so
  /// nothing that is computed later has to be ordered after that copy.
  void end_oldest() override {
    Value& value = values_.at(leaving_.front());
    value.block.last->wait();
    leaving_.pop_front();
    value.leaving = {};
    value.block.last = nullptr;
    PinnedBlocks::Block block = std::exchange(value.block, {});
    value.spilled = value_or_throw(spill_->put({block.memory.get(), value.bytes}));
    idle_.give_back(std::move(block));
  }

  /// Throws if the value is not in the spill because putting it there failed. That failure was reported when it
  /// happened.
  static void expect_spilled(const Value& value) {
    if (!value.spilled)
      throw Error(ExitCode::kIo, "an activation could not be put on disk. [T0087] hint: an earlier message says why");
  }

  /// Begins to bring the value back: reads it from the spill and queues its copy to the device.
  void bring_back(Value& value) {
    expect_spilled(value);
    value.block = idle_block(value.bytes);
    throw_if_error(spill_->get(*value.spilled, {value.block.memory.get(), value.bytes}));
    copy_back(value);
  }

  /// Makes later computation wait for the copy back, and returns where the value lies.
  StoredBytes take(Value& value) {
    value.block.last->join();
    idle_.give_back(std::exchange(value.block, {}));
    return std::exchange(value.coming, {});
  }

  const std::unique_ptr<Spill> spill_;
};

}  // namespace

std::unique_ptr<ActivationTier> host_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                 int rank) {
  return std::make_unique<HostActivations>(accelerator, offload, rank);
}

std::unique_ptr<ActivationTier> device_nvme_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                        int rank) {
  return std::make_unique<DeviceNvmeActivations>(accelerator, offload, rank);
}

}  // namespace tessera
