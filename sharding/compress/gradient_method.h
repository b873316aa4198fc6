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

/// Makes the sums of one group's gradients, of which ranks send only a part (CompressionConfig). Under most biased
/// methods, each rank keeps the part that it did not send, and adds this part to its next contribution (error feedback,
/// arXiv 1901.09847).
class GradientMethod : public SumMethod {
 public:
  virtual ~GradientMethod() = default;
  /// It is called before the reductions of a step, with the step's number, counted from 1. It is also called with 0
  /// when the step has ended or its gradients were dropped.
  virtual void begin_step(std::int64_t) {}
  /// Returns the number of residuals of one element that `ranks` ranks together keep for a reduction.
  virtual std::int64_t holders(std::int64_t ranks) const { return ranks; }
  /// Adds to `kept` the residuals that the method keeps for `group`, whose gradients it sums.
  virtual void add_kept(FlatGroup& group, KeptGradients& kept) const = 0;
};

/// The inputs of a method: the group whose gradients it sums, the ranks that sum them, and its memory.
struct MethodSite {
  const GroupShape& shape;
  std::span<const std::int64_t> numbers;  ///< FlatParameter::number of each parameter of the group
  int rank = 0, ranks = 1;                ///< index of this rank among the ranks that sum, and their number
  /// Memory of the sizes in method_layout. At the start `kept` holds zeros, and `work` may hold any values.
  float* kept = nullptr;
  float* work = nullptr;

  std::int64_t numel() const { return shape.layout.numel(); }
  /// Returns the random numbers of a method that draws the same numbers on all ranks.
  DrawStream common_draws(std::int64_t seed) const { return {seed, numbers.front(), -1}; }
  /// Returns the random numbers of a method that draws other numbers on each rank.
  DrawStream own_draws(std::int64_t seed) const { return {seed, numbers.front(), rank}; }
};

/// A method, or an error (78) if the group has too many elements for the method.
using MadeMethod = absl::StatusOr<std::unique_ptr<GradientMethod>>;

// Declares make_method for each type of method; it is defined in the file of the method.
#define TESSERA_MAKE_METHOD(Config, ...) MadeMethod make_method(const Config& method, const MethodSite& at);
TESSERA_COMPRESSION_METHODS(TESSERA_MAKE_METHOD)
#undef TESSERA_MAKE_METHOD

/// Makes the method for a trainable group. It is null if gradients are sent unchanged, or if a hook of the program sums
/// them.
MadeMethod make_gradient_method(const CompressionMethod& method, const MethodSite& at);

}  // namespace tessera
