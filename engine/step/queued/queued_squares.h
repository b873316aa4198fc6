#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/queued/device_tables.h"
#include "optim/device_kernels.h"
#include "sharding/reduce/gradient_squares.h"
#include "sharding/unit.h"

namespace tessera {

/// Squares a rank's own gradients on its GPU. It gives the same bits as GradientPacker on the CPU with one thread.
/// QueuedStep owns it.
class QueuedSquares final : public GradientSquares {
 public:
  /// `of_step`: one fp64 element in the device's memory, to which `take` adds. `kernels` must outlive this object.
  QueuedSquares(const std::vector<std::unique_ptr<Unit>>& units, at::Tensor of_step, DeviceKernels& kernels,
                c10::Device device);

  void add(const Unit& unit, std::span<const GradientPiece> pieces, DType dtype) override;
  void take() override;
  void forget() override;

 private:
  DeviceKernels& kernels_;
  DeviceTables tables_;
  OwnPieces launch_;           ///< has the addresses that all launches share
  std::uint8_t* is_measured_;  ///< [unit]: whether its gradients were measured
  at::Tensor sum_, measured_;  ///< views of `launch_.sum` and of `is_measured_`
  const at::Tensor of_step_;
  bool has_some_ = false;  ///< whether gradients have come since the last `take`
};

}  // namespace tessera
