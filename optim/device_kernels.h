#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <memory>
#include <span>

#include "optim/adafactor.h"
#include "optim/arithmetic/encoded_parts.h"
#include "optim/arithmetic/outer_rule.h"
#include "optim/arithmetic/own_squares.h"
#include "optim/norm_launch.h"
#include "optim/rules/muon.h"
#include "optim/step_message.h"
#include "runtime/base/wire/sign_messages.h"

namespace tessera {

/// The interface of the kernels of a GPU's step. optim/cuda implements it. Calls other than copies are queued on
/// LibTorch's current stream, in order, behind the work that is already there. Pointers point to device memory unless a
/// comment says otherwise. Errors are std::runtime_error with the device's text.
class DeviceKernels {
 public:
  virtual ~DeviceKernels() = default;

  /// Adds up the norm's nodes of this rank's parts: see optim/cuda/device_norm.h.
  virtual void norm(const NormTables& tables) = 0;
  /// Adds up the squares of a unit's gradients before ranks sum them: see optim/cuda/device_norm.h.
  virtual void own_squares(const OwnPieces& pieces) = 0;
  /// Reads all messages and decides the step: see optim/cuda/device_step.h.
  virtual void decide(const StepRequest& request, const StepTables& tables) = 0;
  /// Begins the update of a unit while backward goes on: see optim/cuda/device_step.h.
  virtual void begin_unit(const StepRequest& request, const UnitRequest& unit, const StepTables& tables) = 0;
  /// Makes the optimizer's pass over one run, in one launch. Nothing happens if the decision is to skip.
  virtual void update(const DeviceRun& run, const StepTables& tables) = 0;
  /// Computes Muon's directions for a run: see optim/cuda/device_step.h.
  virtual void muon_directions(const DeviceRun& run, const MuonMomentumConstants& constants,
                               const StepTables& tables) = 0;
  /// Does the work of LAMB and LARS between their passes: see optim/cuda/device_layers.h.
  virtual void adapt_rates(const StepRequest& request, const LayerTables& layers, const StepTables& tables) = 0;
  /// `read_weights` reads the run's masters, and `assign_weights` writes new masters over them: see
  /// optim/cuda/device_step.h.
  virtual void read_weights(const DeviceRun& run, float* masters) = 0;
  virtual void assign_weights(const DeviceRun& run, const StepTables& tables) = 0;
  /// `write_weights` writes masters over weights, and `outer_pass` makes one pass of an outer step: see
  /// optim/cuda/device_outer.h.
  virtual void write_weights(const StepArguments& to, const float* masters) = 0;
  virtual void outer_pass(const OuterRun& run) = 0;
  /// Does the work of step_adafactor (adafactor.h), with the same bits. `scratch` has adafactor_scratch(tensor)
  /// numbers.
  virtual void adafactor(const AdafactorConfig& config, const AdafactorStep& numbers, const AdafactorTensor& tensor,
                         std::span<double> scratch) = 0;
  /// Exchanges a run's masters and averages, for the parameters that some step has updated.
  virtual void swap_averages(const DeviceRun& run, const StepTables& tables) = 0;

  /// An event, which marks a point in a queue of the device. All work that was queued earlier is "before the mark".
  class Mark {
   public:
    virtual ~Mark() = default;
    virtual bool passed() = 0;
    virtual void wait() = 0;  ///< blocks this thread until everything before the mark is done
    /// Makes later work on the current stream wait for everything before the mark.
    virtual void join() = 0;
  };
  /// Makes a mark at the end of the current stream.
  virtual std::unique_ptr<Mark> mark() = 0;

  /// Returns pinned host memory, so the device can copy from it and to it by itself. It is filled with zeros and begins
  /// at a multiple of 4096 bytes.
  virtual std::shared_ptr<std::byte> pinned_memory(std::size_t bytes) = 0;
  struct UploadPiece {
    void* device;
    const std::byte* pinned;
    std::size_t bytes;
  };
  /// Copies to the device on a separate queue, while the current stream computes. The copies wait only for the mark
  /// `after`, if it is given. The returned mark comes after the copies: join it before using the copied values, and do
  /// not change the pinned memory until the device has passed the mark.
  virtual std::unique_ptr<Mark> upload(std::span<const UploadPiece> pieces, const Mark* after) = 0;
  /// Copies from the device on a separate queue, after all work that is now on the current stream. The returned mark
  /// comes after this copy and all earlier copies: join it before changing `device`. `pinned` holds the bytes once the
  /// device has passed the mark.
  virtual std::unique_ptr<Mark> download(std::byte* pinned, const void* device, std::size_t bytes) = 0;
  /// The next three functions work as `download` and `upload` do, for values that lie on the host in a form of the wire
  /// (EncodedParts), or as signs. The device encodes values before it copies them to the host, and decodes values that
  /// it copies from the host. Residuals are null, or pinned memory: see optim/cuda/device_codec.h and device_signs.h.
  virtual std::unique_ptr<Mark> download_encoded(std::byte* pinned, const void* device, const EncodedParts& parts,
                                                 float* residual) = 0;
  virtual std::unique_ptr<Mark> download_signs(std::byte* pinned, const float* device,
                                               const SignMessages& messages) = 0;
  virtual std::unique_ptr<Mark> upload_encoded(void* device, const std::byte* pinned, const EncodedParts& parts,
                                               const Mark* after) = 0;
  /// Copies memory that no longer changes, and returns when the bytes have arrived. The copy does not wait for queued
  /// work. Any thread may call this function at any time.
  virtual void fetch(std::byte* pinned, const void* device, std::size_t bytes) = 0;

  /// A part of the current stream, from the point at which the Interval was made to the point at which `end` was
  /// called.
  class Interval {
   public:
    virtual ~Interval() = default;
    virtual void end() noexcept = 0;
    /// Returns the interval's length by the device's clock. Throws the error of `end`, if there was one, since `end` is
    /// noexcept. REQUIRES: the device has reached the end of the interval.
    virtual double seconds() = 0;
  };
  virtual std::unique_ptr<Interval> begin_interval() = 0;
};

}  // namespace tessera
