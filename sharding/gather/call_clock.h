#pragma once

// See docs/glossary.md: residency.

#include <chrono>
#include <cstdint>
#include <utility>

#include "runtime/base/metrics/latency_histogram.h"

namespace tessera {

/// Times calls of a queue by the device's clock, which is read later.
class QueueTimes {
 public:
  /// Notes that a call begins here in the queue. Returns the call's number, above 0.
  virtual std::uint64_t begin() = 0;
  /// Notes that the queue has waited here for the end of call `number`. The call's time is added to `latencies` when
  /// the device has reached this point; `latencies` must live until then.
  virtual void end(std::uint64_t number, LatencyHistogram& latencies) = 0;

 protected:
  ~QueueTimes() = default;
};

/// The beginning of a call that is timed. A default-constructed object is for a call that is not timed.
struct CallBegin {
  std::chrono::steady_clock::time_point time = {};
  std::uint64_t number = 0;  ///< result of QueueTimes::begin; 0 if the call is timed by the host's clock
};

/// Times calls by the host's clock, or by a queue's clock. Residency and Reducer each have a CallClock.
class CallClock {
 public:
  /// Makes `queue` time calls from now on; `queue` must outlive this object's last call. If it is null, the host's
  /// clock times calls.
  void use(QueueTimes* queue) { queue_ = queue; }

  CallBegin begin() const {
    return queue_ ? CallBegin{{}, queue_->begin()} : CallBegin{std::chrono::steady_clock::now(), 0};
  }
  /// Adds the time since `begun` to `latencies`, and resets `begun` to a call that is not timed.
  void end(CallBegin& begun, LatencyHistogram& latencies) const {
    const CallBegin of = std::exchange(begun, {});
    if (of.number > 0) {
      queue_->end(of.number, latencies);
    } else if (of.time != std::chrono::steady_clock::time_point()) {
      latencies.add(std::chrono::steady_clock::now() - of.time);
    }
  }

 private:
  QueueTimes* queue_ = nullptr;
};

}  // namespace tessera
