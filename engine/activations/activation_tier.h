#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/Storage.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace tessera {

/// Where bytes of a storage lie, in a storage.
struct StoredBytes {
  c10::Storage storage;
  std::size_t begin = 0;
};

/// All counts are since the tier was made.
struct ActivationCounts {
  std::int64_t values = 0, bytes_put = 0;  ///< put
  std::int64_t bytes_got = 0;
  std::int64_t live_bytes = 0;  ///< of values that were not dropped, now
  std::int64_t peak_bytes = 0;  ///< the most that `live_bytes` was
  std::int64_t disk_bytes_read = 0, disk_bytes_written = 0;
  double disk_wait_seconds = 0;  ///< standing still for the disk

  void add_put(std::size_t bytes) {
    ++values;
    bytes_put += static_cast<std::int64_t>(bytes);
    live_bytes += static_cast<std::int64_t>(bytes);
    peak_bytes = std::max(peak_bytes, live_bytes);
  }
  void drop(std::size_t bytes) { live_bytes -= static_cast<std::int64_t>(bytes); }
};

/// Holds bytes of saved tensors somewhere else than in the memory of the device that computes. For one thread at a time. Errors
/// are c10::Error or std::runtime_error, of transfers that were begun earlier too.
class ActivationTier {
 public:
  using Id = std::int64_t;

  virtual ~ActivationTier() = default;
  /// Begins to take `bytes` of `storage` from `begin` on, as they are now for operators that are called from now on. The memory
  /// goes when the caller has let go of it and the transfer needs it no more. Ids grow.
  virtual Id put(const c10::Storage& storage, std::size_t begin, std::size_t bytes) = 0;
  /// The bytes, for operators that are called from now on, at the same distance from a multiple of 64 as they were. Begins to
  /// bring back those put before them. May be called several times for a value.
  virtual StoredBytes get(Id id) = 0;
  virtual void drop(Id id) = 0;

  virtual ActivationCounts counts() const = 0;
  /// Memory that it took when it was made, as in the plan.
  virtual std::int64_t memory_bytes() const = 0;
  /// The Engine goes, and with it what moves bytes of a GPU. Values stay, and are got without it.
  virtual void close() {}
};

/// Memory for a value's bytes, such that they may lie at any distance from a multiple of 64.
inline at::Tensor bytes_on(c10::Device device, std::size_t bytes) {
  return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device));
}

/// So far from a multiple of 64 does `data` lie. What is brought back lies the same, so that operators compute it alike.
inline std::size_t phase_of(const void* data) { return reinterpret_cast<std::uintptr_t>(data) % 64; }

}  // namespace tessera
