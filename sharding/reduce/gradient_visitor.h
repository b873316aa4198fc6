#pragma once

#include <span>

#include "sharding/unit.h"

namespace tessera {

/// Sees gradients while the reduction that completes them still has them in cache. Without it, code that needs all
/// gradients would have to read them from memory once more.
class GradientVisitor {
 public:
  /// A reduction of `group` begins: forget what was seen of its gradient before.
  virtual void begin(const FlatGroup& group) = 0;
  /// The next elements of `group.gradient` [gradient_part], in order from its first, as they are now. All but the last
  /// run have a multiple of SumVisitor::kAlignment elements.
  virtual void visit(const FlatGroup& group, std::span<const float> values) = 0;

 protected:
  ~GradientVisitor() = default;
};

}  // namespace tessera
