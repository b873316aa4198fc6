#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/agree/gradient_norm.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// The norms that LAMB and LARS compare: of each parameter's weights, and of its update. Added up by the trees of
/// optim/grad_norm.h over what the optimizer parts of all ranks hold, so their bits are those of every strategy.
///
///   begin(group); add_weights(group, ...), add_update(group, ...) from its beginning to its end; for all groups; then
///   agree(): collective
class LayerNorms {
 public:
  /// `of_updates`: whether updates are added too.
  LayerNorms(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement optimizer, const MeshAxes& axes,
             bool of_updates);

  void begin(const FlatGroup& group);
  /// fp32 values of the elements from `first` on, counted in the group's flat buffer. Elements that are left out count
  /// as zeros.
  void add_weights(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  void add_update(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  /// Collective. Throws tessera::Error.
  void agree();

  /// The norms of the parameter with FlatParameter::number `number`, as the latest `agree` found them.
  double weights(std::int64_t number) const;
  double update(std::int64_t number) const;

  /// Spent on meeting the other ranks so far.
  double seconds() const { return seconds_; }

 private:
  /// Norms of one kind.
  struct Kind {
    std::vector<NormSums> sums;   ///< [group, in unit order]; of frozen ones unused
    std::vector<double> squares;  ///< [FlatParameter::number]
  };
  NormSums& sums_of(Kind& kind, const FlatGroup& group);
  void add(Kind& kind, const FlatGroup& group, std::int64_t first, std::span<const float> values);

  const std::vector<std::unique_ptr<Unit>>& units_;
  const std::shared_ptr<Collectives> world_;
  const std::vector<int> ranks_with_parts_;
  const NormTotals totals_;
  std::vector<std::size_t> first_of_unit_;
  std::vector<Kind> kinds_;                 ///< weights, and updates where they are added
  std::vector<double> message_, messages_;  ///< this rank's; all ranks'
  std::vector<const double*> parts_;
  double seconds_ = 0;
};

}  // namespace tessera
