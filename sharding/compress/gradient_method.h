#pragma once

#include <cstdint>
#include <memory>

#include "runtime/comm/collectives.h"
#include "sharding/compress/kept_gradients.h"
#include "sharding/unit.h"
#include "tessera/comm_hook.h"
#include "tessera/strategy.h"

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
  /// Returns how many residuals of one element a reduction keeps, on `ranks` ranks together.
  virtual std::int64_t holders(std::int64_t ranks) const { return ranks; }
  /// Adds to `kept` what the method keeps for `group`, whose gradients it sums.
  virtual void add_kept(FlatGroup& group, KeptGradients& kept) const = 0;
};

/// Throws tessera::Error (64) where compression.method is of type hook and there is no hook, or the other way round.
void expect_comm_hook(const CompressionConfig& compression, const CommHook* hook);

/// Returns the plan's method for a trainable group. It is null if gradients are sent unchanged, or by a program's hook.
/// `kept` (all zeros at the start) and `work` are as MemoryPlan::method_layout_of says.
std::unique_ptr<GradientMethod> make_gradient_method(const MemoryPlan& plan, const FlatGroup& group, float* kept,
                                                     float* work);

}  // namespace tessera
