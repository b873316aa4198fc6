#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <span>

#include "sharding/unit.h"
#include "tessera/dtype.h"

namespace tessera {

/// Gradients of a parameter that lie one behind the other in memory of a GPU.
struct GradientPiece {
  const std::byte* values = nullptr;
  std::int64_t numel = 0;
};

/// Squares this rank's own gradients on a GPU, for "noise_scale": only the device knows the sum. On the CPU,
/// GradientPacker does this. The step owns one, and the Reducer calls it from the thread that runs backward; all is
/// queued on the current stream.
class GradientSquares {
 public:
  /// Adds the squared norm of this rank's own gradients of `unit`: they are the `pieces`, of `dtype`, in the order of
  /// parameters. A unit that comes twice between two calls of `take` makes the sum NaN, unless one of the two norms is
  /// 0.
  virtual void add(const Unit& unit, std::span<const GradientPiece> pieces, DType dtype) = 0;
  /// Adds to the step's squares those that have come since the last call.
  virtual void take() = 0;
  /// Drops the squares that were added since the last `take`.
  virtual void forget() = 0;

 protected:
  ~GradientSquares() = default;
};

}  // namespace tessera
