#pragma once

#include <span>

#include "sharding/unit.h"

namespace tessera {

/// Sees gradients while the reduction that completes them still has them in cache; what it makes of them would else be
/// a pass of its own over memory.
class GradientVisitor {
 public:
  /// A reduction of `group` begins: what was seen of its gradient is void.
  virtual void begin(const FlatGroup& group) = 0;
  /// The next elements of `group.gradient` [gradient_part], in order from its first, as they are now. All but the last
  /// run have a multiple of SumVisitor::kAlignment elements.
  virtual void visit(const FlatGroup& group, std::span<const float> values) = 0;

 protected:
  ~GradientVisitor() = default;
};

}  // namespace tessera
