#pragma once

#include <span>

#include "sharding/unit.h"

namespace tessera {

/// Gets gradients while the reduction that completes them still has them in cache. Otherwise code that needs all
/// gradients would have to read them from memory once more. GradientNorm is such a visitor.
class GradientVisitor {
 public:
  /// It is called when a reduction of `group` begins. The visitor must forget the elements of the group's gradient that
  /// it got earlier.
  virtual void begin(const FlatGroup& group) = 0;
  /// Gets the next elements of `group.gradient` [gradient_part], in order, with their present values. Each call except
  /// the last gets a multiple of SumVisitor::kAlignment elements.
  virtual void visit(const FlatGroup& group, std::span<const float> values) = 0;

 protected:
  ~GradientVisitor() = default;
};

}  // namespace tessera
