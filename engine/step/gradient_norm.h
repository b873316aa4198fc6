#pragma once

#include <memory>
#include <span>
#include <vector>

#include "optim/grad_norm.h"
#include "sharding/gradient_visitor.h"
#include "sharding/unit.h"

namespace tessera {

/// The norm trees of this rank's gradient parts, one a trainable group, filled while the reducer makes the gradients.
class GradientNorm final : public GradientVisitor {
 public:
  explicit GradientNorm(const std::vector<std::unique_ptr<Unit>>& units);

  void begin(const FlatGroup& group) override;
  void visit(const FlatGroup& group, std::span<const float> values) override;

  /// `group`'s sums, complete: read from memory where no reduction showed them (one rank).
  const NormTree::Builder& sums_of(const FlatGroup& group);
  const NormTree& tree_of(const FlatGroup& group) const { return entry(group).tree; }

  /// After the optimizer has used the gradients.
  void reset();

 private:
  struct Entry {
    NormTree tree;
    NormTree::Builder builder;
    bool seen = false;
  };

  Entry& entry(const FlatGroup& group) { return entries_[first_of_unit_[group.unit->index] + group.index]; }
  const Entry& entry(const FlatGroup& group) const { return const_cast<GradientNorm*>(this)->entry(group); }

  std::vector<std::size_t> first_of_unit_;
  std::vector<Entry> entries_;  ///< [group, in unit order]; of frozen ones unused
};

}  // namespace tessera
