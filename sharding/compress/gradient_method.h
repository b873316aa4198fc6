#pragma once

#include <absl/status/statusor.h>

#include <cstdint>
#include <memory>
#include <span>

#include "runtime/comm/sum/sum_method.h"
#include "sharding/compress/draw_stream.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/layout/shapes.h"
#include "tessera/compression_methods.h"

namespace tessera {

/// Makes the sums of one group's gradients from less than all of them (CompressionConfig). Where a method is biased,
/// each rank keeps what its contribution lacked, and adds it to its next contribution (error feedback, arXiv
/// 1901.09847).
class GradientMethod : public SumMethod {
 public:
  virtual ~GradientMethod() = default;
  /// Says that the reductions that follow belong to this step, counted from 1. 0: the step is over, or its gradients
  /// were dropped.
  virtual void begin_step(std::int64_t) {}
  /// Returns how many residuals of one element `ranks` ranks keep together for a reduction.
  virtual std::int64_t holders(std::int64_t ranks) const { return ranks; }
  /// Adds to `kept` what the method keeps for `group`, whose gradients it sums.
  virtual void add_kept(FlatGroup& group, KeptGradients& kept) const = 0;
};

/// Where a method works: the group whose gradients it sums, the ranks that sum them, and its memory.
struct MethodSite {
  const GroupShape& shape;
  std::span<const std::int64_t> numbers;  ///< FlatParameter::number of each parameter of the group
  int rank = 0, ranks = 1;                ///< index of this rank among those that sum, and their number
  /// Memory of the size that method_layout says: `kept` is all zeros at the start, and `work` may hold anything.
  float* kept = nullptr;
  float* work = nullptr;

  std::int64_t numel() const { return shape.layout.numel(); }
  /// Returns the random numbers of a method that draws the same ones on all ranks.
  DrawStream common_draws(std::int64_t seed) const { return {seed, numbers.front(), -1}; }
  /// Returns the random numbers of a method of which each rank draws its own.
  DrawStream own_draws(std::int64_t seed) const { return {seed, numbers.front(), rank}; }
};

/// A method, or an error (78) where the group has too many elements for it.
using MadeMethod = absl::StatusOr<std::unique_ptr<GradientMethod>>;

// The file of each method has the function for its type.
#define TESSERA_MAKE_METHOD(Config, ...) MadeMethod make_method(const Config& method, const MethodSite& at);
TESSERA_COMPRESSION_METHODS(TESSERA_MAKE_METHOD)
#undef TESSERA_MAKE_METHOD

/// Makes the method for a trainable group. It is null if gradients are sent unchanged, or by a program's hook.
MadeMethod make_gradient_method(const CompressionMethod& method, const MethodSite& at);

}  // namespace tessera
