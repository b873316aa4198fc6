#pragma once

// See docs/glossary.md: slot, tier.

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "engine/device/accelerator.h"
#include "offload/spill.h"
#include "tessera/strategy.h"

namespace tessera {

/// The place of bytes: a storage, and the offset of the bytes in the storage.
struct StoredBytes {
  c10::Storage storage;
  std::size_t begin = 0;
};

/// Counts of the values and bytes that a tier has transferred. All counts begin with 0 when the tier is made.
struct ActivationCounts {
  std::int64_t values = 0, bytes_put = 0;  ///< calls of `put`, and the bytes that they were given
  std::int64_t bytes_got = 0;
  std::int64_t live_bytes = 0;  ///< bytes of the values that were put and not dropped
  std::int64_t peak_bytes = 0;  ///< the largest value that `live_bytes` had
  std::int64_t disk_bytes_read = 0, disk_bytes_written = 0;
  double disk_wait_seconds = 0;  ///< time that the caller waited for the disk

  void add_put(std::size_t bytes) {
    ++values;
    bytes_put += static_cast<std::int64_t>(bytes);
    live_bytes += static_cast<std::int64_t>(bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
  }
  void drop(std::size_t bytes) { live_bytes -= static_cast<std::int64_t>(bytes); }
};

/// Holds bytes of saved tensors outside the memory of the device that computes. SavedActivations owns a tier and calls
/// it under a mutex, so one thread at a time calls it. A tier's errors are c10::Error or std::runtime_error. A call may
/// also throw the error of a transfer that an earlier call began.
class ActivationTier {
 public:
  using Id = std::int64_t;

  virtual ~ActivationTier() = default;
  /// Begins to copy `bytes` bytes of `storage`, from byte `begin` on, to the tier. The copy gets the values that an
  /// operator would read at the time of this call. The storage is freed once the caller no longer holds it and the
  /// transfer has ended. Returns the value's id, which is larger than all earlier ids.
  virtual Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) = 0;
  /// Returns the value's bytes. Only operators that are called after this call may read them. The address has the same
  /// distance to a multiple of 64 as the original address. The call also begins to bring back the values that were put
  /// just before this value. `get` may be called several times for a value.
  virtual StoredBytes get(Id id) = 0;
  /// Removes a value that is no longer needed.
  virtual void drop(Id id) = 0;

  virtual ActivationCounts counts() const = 0;
  /// Returns the bytes of host memory that the tier took when it was made, as the plan counts them.
  virtual std::int64_t memory_bytes() const = 0;
  /// It is called before the Engine is destroyed. The Engine's kernels, which move bytes of a GPU, are destroyed with
  /// the Engine. The values stay on the tier; later calls of `get` bring them back without those kernels.
  virtual void close() {}
};

/// Allocates `bytes` bytes on `device` for a value, and for the gap of `phase_of` bytes in front of it.
inline at::Tensor bytes_on(c10::Device device, std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
}

/// Returns the distance of `data` from a multiple of 64, in bytes. A value that is brought back has the same distance,
/// so that operators compute with it as they did before.
inline std::size_t phase_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 64; }

/// Keeps activations of a CPU in scratch files (`"offload.activations"`: `"nvme"`, on the CPU). `put` copies the bytes
/// into the spill's slots, so the caller may free its memory when `put` returns. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<ActivationTier> nvme_activations(const OffloadConfig& offload, int rank);

/// Creates the scratch files for the activations of rank `rank` in the directories of `offload`. The tiers on disk
/// (nvme_activations, device_nvme_activations) call it once, when they are made. Throws the tessera::Errors of
/// Spill::create.
std::unique_ptr<Spill> activation_spill(const OffloadConfig& offload, int rank);

/// Returns `counts` with the disk's counts filled in from `disk`, the counters of the spill.
ActivationCounts with_disk(ActivationCounts counts, const TierCounters& disk);

// The next two functions make the tiers for activations of a GPU. Both tiers copy values through pinned memory of the
// host. The copies run on streams of their own, at the same time as the computation. The pinned memory is allocated
// when it is needed, and used again for values that are not larger. A loop with the same sizes in each step therefore
// allocates no more. Both use the accelerator's kernels until `close`.

/// Keeps activations in pinned memory of the host (`"offload.activations"`: `"host"`). No call before `close` waits for
/// the device.
///
/// **Out.** The tensor's storage is held until the copy out has been joined (DeviceKernels::Mark::join). After that,
/// later work in the freed memory is ordered after the copy. No more than `queue_depth` copies are on their way out;
/// the next `put` joins the oldest. **Back.** `get` joins the copy that brings the value back. It begins to bring back
/// the `queue_depth` values that were put before this value. Each copy back takes device memory when it begins.
std::unique_ptr<ActivationTier> host_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                 int rank);

/// Keeps activations in scratch files (`"offload.activations"`: `"nvme"`, on a GPU). Throws the tessera::Errors of
/// Spill::create.
///
/// **Out.** A copy to the host begins immediately, and holds the tensor's storage. Once `queue_depth` further copies
/// have begun, the host waits for this copy, frees the storage, and puts the value into the spill, which writes it in
/// the background. **Back.** `get` takes the value from the spill (which reads ahead), and queues the value's copy to
/// the device. `get` then does the same with the value that was put just before this one. That earlier value arrives
/// while the device computes with this one. **Host memory**: the spill's slots, which the plan counts, and the pinned
/// memory.
std::unique_ptr<ActivationTier> device_nvme_activations(const Accelerator& accelerator, const OffloadConfig& offload,
                                                        int rank);

}  // namespace tessera
