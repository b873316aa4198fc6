#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "runtime/base/status.h"
#include "workshop/bench/pass_timing.h"

namespace tessera {

// Benchmarks of kernels share this code. Work is queued on the current GPU's default stream. Errors are those of CUDA,
// with exit code 69.

inline absl::Status status_of_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return make_error(ExitCode::kUnavailable, std::string(what) + ": " + cudaGetErrorString(error));
}

/// Device memory, zero at first.
class TimedMemory {
 public:
  TimedMemory() = default;
  static absl::StatusOr<TimedMemory> of(std::size_t bytes) {
    TimedMemory memory;
    void* data = nullptr;
    TESSERA_RETURN_IF_ERROR(status_of_cuda(cudaMalloc(&data, std::max<std::size_t>(bytes, 1)), "cudaMalloc"));
    memory.data_.reset(data);
    TESSERA_RETURN_IF_ERROR(status_of_cuda(cudaMemset(data, 0, bytes), "cudaMemset"));
    return memory;
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_.get());
  }

 private:
  struct Free {
    void operator()(void* data) const { cudaFree(data); }
  };
  std::unique_ptr<void, Free> data_;
};

/// A point in the stream.
class TimedPoint {
 public:
  TimedPoint() { cudaEventCreate(&event_); }
  ~TimedPoint() { cudaEventDestroy(event_); }
  TimedPoint(const TimedPoint&) = delete;
  TimedPoint& operator=(const TimedPoint&) = delete;
  cudaError_t record() const { return cudaEventRecord(event_, nullptr); }
  absl::StatusOr<std::int64_t> nanoseconds_since(const TimedPoint& before) const {
    TESSERA_RETURN_IF_ERROR(status_of_cuda(cudaEventSynchronize(event_), "cudaEventSynchronize"));
    float milliseconds = 0;
    TESSERA_RETURN_IF_ERROR(
        status_of_cuda(cudaEventElapsedTime(&milliseconds, before.event_, event_), "cudaEventElapsedTime"));
    return static_cast<std::int64_t>(milliseconds * 1e6);
  }

 private:
  cudaEvent_t event_ = nullptr;
};

/// Measures the limit of a kernel: the time in which a copy on the device reads and writes as many bytes, half of them
/// each. The copy has a fixed size, and its time is scaled.
class CopyLimit {
 public:
  static absl::StatusOr<CopyLimit> make() {
    CopyLimit limit;
    TESSERA_ASSIGN_OR_RETURN(limit.from_, TimedMemory::of(kBytes));
    TESSERA_ASSIGN_OR_RETURN(limit.to_, TimedMemory::of(kBytes));
    return limit;
  }

  /// Times `pass`, which queues work, and the limit, in turns: `rounds` times after one round of warm-up.
  template <class Pass>
  absl::Status time(PassTiming& timing, int rounds, const Pass& pass) const {
    const auto copy = [&] {
      return status_of_cuda(
          cudaMemcpyAsync(to_.as<void>(), from_.as<void>(), kBytes, cudaMemcpyDeviceToDevice, nullptr),
          "cudaMemcpyAsync");
    };
    const double share = static_cast<double>(timing.bytes) / (2.0 * kBytes);
    for (int round = -1; round < rounds; ++round) {
      TESSERA_ASSIGN_OR_RETURN(const std::int64_t copy_ns, nanoseconds_of(copy));
      TESSERA_ASSIGN_OR_RETURN(const std::int64_t pass_ns, nanoseconds_of(pass));
      if (round < 0) continue;
      timing.limit.ns.push_back(static_cast<std::int64_t>(static_cast<double>(copy_ns) * share));
      timing.pass.ns.push_back(pass_ns);
    }
    return absl::OkStatus();
  }

 private:
  static constexpr std::size_t kBytes = std::size_t{1} << 30;

  template <class Body>
  static absl::StatusOr<std::int64_t> nanoseconds_of(const Body& body) {
    const TimedPoint before, after;
    TESSERA_RETURN_IF_ERROR(status_of_cuda(before.record(), "cudaEventRecord"));
    TESSERA_RETURN_IF_ERROR(body());
    TESSERA_RETURN_IF_ERROR(status_of_cuda(after.record(), "cudaEventRecord"));
    return after.nanoseconds_since(before);
  }

  TimedMemory from_, to_;
};

}  // namespace tessera
