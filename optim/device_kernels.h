#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "optim/norm_launch.h"
#include "optim/step_message.h"

namespace tessera {

/// What a step on a GPU runs there. Calls are queued, in order, behind what LibTorch has queued on the current stream, but
/// for copies. Pointers are device memory, but where said. Errors are std::runtime_error with the device's text.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  /// Adds up the norm's nodes of this rank's parts: see optim/cuda/device_norm.h.
  virtual void norm(const NormTables& tables) = 0;
  /// Reads all messages and decides the step: see optim/cuda/device_step.h.
  virtual void decide(const StepRequest& request, const StepTables& tables) = 0;
  /// The optimizer's pass over one run, in one launch. Nothing if the decision is to skip.
  virtual void update(const DeviceRun& run, const StepTables& tables) = 0;

  /// A place in a queue of the device.
  class Mark {
   public:
    virtual ~Mark() = default;
    virtual bool passed() = 0;
    virtual void wait() = 0;  ///< blocks this thread until all before it is done
    virtual void join() = 0;  ///< what is queued for computing from now on comes after all before it
  };
  /// Of what computes.
  virtual std::unique_ptr<Mark> mark() = 0;

  /// Host memory that the device copies from and to by itself; zero-filled.
  virtual std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) = 0;
  struct UploadPiece {
    void* device;
    const std::byte* pinned;
    std::size_t bytes;
  };
  /// Copies on a queue of their own, beside what computes: after `after` if given, and nothing else. Who uses what they
  /// bring joins the mark first; until it is passed, `pinned` stays as it is.
  virtual std::unique_ptr<Mark> upload(std::span<const UploadPiece> pieces, const Mark* after) = 0;
  /// A copy on a queue of its own, after all that is queued for computing now. Who changes `device` joins the mark first;
  /// when it is passed, `pinned` is there.
  virtual std::unique_ptr<Mark> download(std::byte* pinned, const void* device, std::size_t bytes) = 0;

  /// A stretch of the queue, from where it was made up to `end`.
  class Interval {
   public:
    virtual ~Interval() = default;
    virtual void end() noexcept = 0;
    /// By the device's clock; throws what `end` could not. REQUIRES: the device has come to its end.
    virtual double seconds() = 0;
  };
  virtual std::unique_ptr<Interval> begin_interval() = 0;
};

}  // namespace tessera
