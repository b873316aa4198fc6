#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "optim/device_kernels.h"
#include "sharding/gather/call_clock.h"

namespace tessera {

/// Times a GPU's calls, for Engine::latencies. A time begins where the call was queued in the current stream, and ends
/// where the stream waits for the end of the call. Training owns it, and calls it from the thread that trains.
class QueuedCallTimes final : public QueueTimes {
 public:
  /// `kernels` must outlive this object.
  explicit QueuedCallTimes(DeviceKernels& kernels) : kernels_(kernels) {}

  std::uint64_t begin() override;
  void end(std::uint64_t number, LatencyHistogram& latencies) override;

  /// Adds the times of the calls that have ended on the device, without a wait. It is called when a step is queued.
  void end_step();
  /// Waits for the device, and adds the times of all calls that have ended.
  void wait();

 private:
  struct Ended {
    std::unique_ptr<DeviceKernels::Interval> time;
    LatencyHistogram* latencies;
  };
  /// Calls whose ends come before `mark` in the stream.
  struct Batch {
    std::unique_ptr<DeviceKernels::Mark> mark;
    std::vector<Ended> calls;
  };
  void close_batch();
  void add_first_batch();

  DeviceKernels& kernels_;
  std::uint64_t last_ = 0;                                                  ///< the number of the latest call
  std::map<std::uint64_t, std::unique_ptr<DeviceKernels::Interval>> open_;  ///< [number]: a call that has not ended
  std::vector<Ended> ended_;                                                ///< since the latest batch was closed
  std::deque<Batch> batches_;                                               ///< in the order of their marks
};

}  // namespace tessera
