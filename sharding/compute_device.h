#pragma once

#include <c10/core/Device.h>

namespace tessera {

class QueueClock;

/// The device on which training state lives and operators run.
struct ComputeDevice {
  c10::Device device = c10::Device(c10::kCPU);
  /// Whether operators are queued on the current stream and run later, in order. Host code may then access memory only
  /// through LibTorch, and waiting for a Work puts the wait into the queue. It is false on the CPU.
  bool is_queued = false;
  /// The clock that measures how long the queue waits for collectives; null if operators are not queued.
  QueueClock* waits = nullptr;
};

/// Measures the time between two points of a queue, by the device's clock.
class QueueClock {
 public:
  /// Marks the beginning and the end of an interval of the queue.
  virtual void begin() = 0;
  virtual void end() = 0;

 protected:
  ~QueueClock() = default;
};

/// Times an interval of the queue by `clock` (which may be null). The interval lasts from the constructor to the
/// destructor of this object.
class Timed {
 public:
  explicit Timed(QueueClock* clock) : clock_(clock) {
    if (clock_) clock_->begin();
  }
  ~Timed() {
    if (clock_) clock_->end();
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  QueueClock* const clock_;
};

}  // namespace tessera
