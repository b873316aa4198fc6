#pragma once

// See docs/glossary.md: unit.

#include <memory>
#include <span>
#include <vector>

#include "optim/grad_norm.h"
#include "sharding/reduce/gradient_visitor.h"
#include "sharding/unit.h"

namespace tessera {

/// Returns the runs of parameters in `part` of a group's flat buffer. The tensor number of a run is
/// FlatParameter::number.
std::vector<NormRun> norm_runs(const FlatGroup& group, Extent part);

/// Describes how the norm is made from sums: each trainable group is cut into `parts` equal parts, and each part has
/// the sums of its runs (norm_runs). Frozen parameters are left out.
NormTotals norm_totals(const std::vector<std::unique_ptr<Unit>>& units, std::size_t parts);

/// The norm's sums over this rank's gradient parts, filled while the reducer makes the gradients.
class GradientNorm final : public GradientVisitor {
 public:
  explicit GradientNorm(const std::vector<std::unique_ptr<Unit>>& units);

  void begin(const FlatGroup& group) override;
  void visit(const FlatGroup& group, std::span<const float> values) override;

  /// Returns the complete sums of `group`. A job of one rank makes no reduction that would pass the gradients to this
  /// object, so this function reads them from memory.
  const NormSums& sums_of(const FlatGroup& group);

  /// Forgets the sums. Call it after the optimizer has used the gradients.
  void reset();

 private:
  struct Entry {
    NormSums sums;
    bool seen = false;
  };

  Entry& entry(const FlatGroup& group) { return entries_[first_of_unit_[group.unit->index] + group.index]; }

  std::vector<std::size_t> first_of_unit_;
  std::vector<Entry> entries_;  ///< [group, in unit order]; unused for frozen groups
};

}  // namespace tessera
