#pragma once

#include <cstddef>
#include <deque>
#include <map>

#include "engine/activations/activation_tier.h"
#include "engine/activations/pinned_blocks.h"
#include "optim/device_kernels.h"
#include "sharding/compute_device.h"

namespace tessera {

/// Keeps activations of a GPU in pinned memory of its host (`"offload.activations"`: `"host"`). Copies run on streams
/// of their own beside the computation. No call but `close` waits for the device.
///
/// **Out.** The tensor's storage is held until the copy out has been joined. After that, later work in the freed memory
/// is ordered after the copy. No more than `queue_depth` copies are on their way out; the next `put` joins the oldest.
/// **Back.** `get` joins the copy back, and begins those of the `queue_depth` values that were put before it. Each copy
/// takes device memory when it begins.
/// **Host memory** is taken as it is needed and used again for values that are no larger, so a steady loop takes none.
class HostActivations final : public ActivationTier {
 public:
  /// `kernels` are used until `close`.
  HostActivations(ComputeDevice device, DeviceKernels& kernels, std::size_t queue_depth, int rank);
  ~HostActivations() override;

  Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) override;
  StoredBytes get(Id id) override;
  void drop(Id id) override;
  ActivationCounts counts() const override { return counts_; }
  std::int64_t memory_bytes() const override { return 0; }
  /// Waits for the copies under way.
  void close() override;

 private:
  struct Value {
    PinnedBlocks::Block block;
    std::size_t bytes = 0, phase = 0;
    StoredBytes leaving;  ///< read by a copy out that was not joined yet
    StoredBytes coming;   ///< written by a copy back that was not joined yet
  };

  static void let_go(Value& value);
  void bring_back(Value& value);

  const ComputeDevice device_;
  DeviceKernels* kernels_;  ///< null after `close`
  const std::size_t queue_depth_;
  std::map<Id, Value> values_;
  std::deque<Id> leaving_;  ///< values whose copy out was not joined yet, oldest first
  /// Free blocks. Their last copy was joined, so it comes before every copy that is queued from now on.
  PinnedBlocks idle_;
  Id next_ = 0;
  ActivationCounts counts_;
};

}  // namespace tessera
