#pragma once

// See docs/glossary.md: slot.

#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>

#include "engine/activations/activation_tier.h"
#include "engine/activations/pinned_blocks.h"
#include "offload/spill.h"
#include "optim/device_kernels.h"
#include "sharding/compute_device.h"
#include "tessera/strategy.h"

namespace tessera {

/// Keeps activations of a GPU in scratch files; they go through pinned memory of its host (`"offload.activations"`:
/// `"nvme"`, on a GPU).
///
/// **Out.** A copy to the host begins at once, runs beside the computation, and holds the tensor's storage. Once
/// `queue_depth` further copies have begun, the host waits for it, frees the storage, and puts the value into the
/// spill, which writes it in the background.
/// **Back.** `get` takes the value from the spill, which reads ahead, and queues its copy to the device. It then does
/// the same with the value that was put before it; that value arrives while the device computes with this one.
/// **Host memory**: the spill's slots, which the plan counts; and pinned blocks, like those of HostActivations, for the
/// values on their way.
class DeviceNvmeActivations final : public ActivationTier {
 public:
  /// `kernels` are used until `close`. Throws the tessera::Errors of Spill::create.
  DeviceNvmeActivations(ComputeDevice device, DeviceKernels& kernels, const OffloadConfig& offload, int rank);
  ~DeviceNvmeActivations() override;

  Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) override;
  StoredBytes get(Id id) override;
  void drop(Id id) override;
  ActivationCounts counts() const override;
  std::int64_t memory_bytes() const override { return static_cast<std::int64_t>(spill_->memory_bytes()); }
  /// Waits for the copies under way, and puts values that were on their way out into the spill.
  void close() override;

 private:
  struct Value {
    std::size_t bytes = 0, phase = 0;
    std::optional<Spill::Id> spilled;  ///< id of the value in the spill; empty while the value is on its way out
    PinnedBlocks::Block block;         ///< the block of a copy that is under way
    StoredBytes leaving;               ///< read by a copy out that the host has not waited for
    StoredBytes coming;                ///< written by a copy back that was not joined yet
  };

  void spill_oldest();
  static void expect_spilled(const Value& value);
  void bring_back(Value& value);
  StoredBytes take(Value& value);
  PinnedBlocks::Block idle_block(std::size_t bytes);

  const ComputeDevice device_;
  DeviceKernels* kernels_;  ///< null after `close`
  const std::size_t queue_depth_;
  std::unique_ptr<Spill> spill_;
  std::map<Id, Value> values_;
  std::deque<Id> leaving_;  ///< values on their way out, oldest first
  PinnedBlocks idle_;
  Id next_ = 0;
  ActivationCounts counts_;  ///< all counts but those of the disk, which the spill keeps
};

}  // namespace tessera
