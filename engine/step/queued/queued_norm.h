#pragma once

// See docs/glossary.md: unit.

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/queued/device_tables.h"
#include "optim/device_kernels.h"
#include "sharding/reduce/pack/gradient_squares.h"
#include "sharding/unit.h"

namespace tessera {

/// Returns the tables that kernels read, made from `launch`.
NormTables norm_tables(const NormLaunch& launch, DeviceTables& memory);

/// Returns a copy of `tables` for values at `values`; `tables` were made for values at `made_for`.
NormTables moved(NormTables tables, const float* made_for, const float* values);

/// Queues the norm's sums over this rank's gradients on a GPU. Usually it adds up the squares of all gradients at once
/// in the step. If the gradients of units have no memory of their own, it adds up the squares of each unit as soon as
/// the unit's sum over ranks is complete. QueuedStep owns and calls it.
class QueuedNorm {
 public:
  /// `groups`: the trainable groups, in the order of units. `sums`: memory of the device for the sums of squares of all
  /// groups' gradient parts; NormSums::count returns their number. `kernels` must outlive this object.
  QueuedNorm(std::span<FlatGroup* const> groups, double* sums, bool by_unit, DeviceKernels& kernels,
             c10::Device device);

  /// Adds a unit whose sum is complete on the current stream. It is called again if a gradient came later.
  /// FlatGroup::gradient of each group of the unit points to the group's sum. The sums of the groups follow each other
  /// (place_gradients).
  void add(const Unit& unit);
  /// It is called when the sums of all units are on the current stream.
  void finish();

  /// Returns the sums that `add` fills for a trainable unit. REQUIRES: `by_unit`.
  std::span<const double> sums_of(const Unit& unit) const { return units_[static_cast<std::size_t>(unit.index)].sums; }

 private:
  struct OfUnit {
    const FlatGroup* first = nullptr;  ///< first trainable group; null: the unit trains nothing
    std::span<const double> sums;      ///< sums in the device's memory
    NormTables tables;                 ///< made for gradients that lie at `at`
    const float* at = nullptr;
  };
  const bool by_unit_;
  DeviceKernels& kernels_;
  DeviceTables tables_;
  NormTables all_;             ///< used unless norms are computed by unit
  std::vector<OfUnit> units_;  ///< [unit]: sums and tables of the unit
};

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
