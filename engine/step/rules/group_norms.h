#pragma once

// See docs/glossary.md: flat group.

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/step/rules/layerwise_rule.h"
#include "optim/grad_norm.h"
#include "sharding/unit.h"

namespace tessera {

/// Computes the same norms as LayerNorms, for one flat group of which the caller has all elements, so there is no
/// exchange. The sums use the same trees as the sums of LayerNorms, so the norms have the same bits. One thread at a
/// time may use it.
///
///   begin(); add_weights(...), add_update(...) in the order of elements; end(); of(i)
class GroupNorms {
 public:
  /// The object keeps no reference to `group`.
  explicit GroupNorms(const FlatGroup& group);

  void begin();
  /// These add fp32 values of the elements from `first` on, counted in the group's flat buffer. Parameters that are
  /// left out count as zeros.
  void add_weights(std::int64_t first, std::span<const float> values) { add(weights_, first, values); }
  void add_update(std::int64_t first, std::span<const float> values) { add(updates_, first, values); }
  void end();

  /// Returns the norms of the group's parameter `i`. REQUIRES: `end` was called.
  LayerNormPair of(std::size_t i) const;

 private:
  struct Kind {
    NormSums sums;
    std::vector<double> squares;  ///< [parameter]
  };
  static Kind kind_of(const FlatGroup& group);
  static void add(Kind& kind, std::int64_t first, std::span<const float> values);

  NormTotals totals_;
  std::uint64_t numel_;  ///< elements of the group
  Kind weights_, updates_;
};

}  // namespace tessera
