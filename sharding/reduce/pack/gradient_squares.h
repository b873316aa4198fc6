#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>

#include "sharding/unit.h"
#include "tessera/dtype.h"

namespace tessera {

/// A run of one parameter's gradients in memory of a GPU.
struct GradientPiece {
  const std::byte* values = nullptr;
  std::int64_t numel = 0;
};

/// Adds up the squares of this rank's own gradients on a GPU, for "noise_scale". Only the device has the sum. If the
/// CPU trains, GradientPacker adds up the squares. The step owns a GradientSquares. The Reducer calls it from the
/// thread that runs backward; all work is queued on the current stream.
class GradientSquares {
 public:
  /// Adds the squared norm of this rank's own gradients of `unit`. The gradients are the `pieces`, of `dtype`, in the
  /// order of parameters. If a unit is added twice between two calls of `take`, the sum becomes NaN, unless one of the
  /// two norms is 0.
  virtual void add(const Unit& unit, std::span<const GradientPiece> pieces, DType dtype) = 0;
  /// Adds the squares since the last call of `take` to the squares of the step.
  virtual void take() = 0;
  /// Drops the squares that were added since the last `take`.
  virtual void forget() = 0;

 protected:
  ~GradientSquares() = default;
};

}  // namespace tessera
