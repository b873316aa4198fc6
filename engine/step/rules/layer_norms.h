#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/step/agree/gradient_norm.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// One exchange in which ranks agree on the norms of some trainable groups.
struct LayerMeeting {
  std::vector<const FlatGroup*> groups;
  std::vector<std::size_t> numbers;  ///< [tensor of `totals`]: FlatParameter::number, in the order of the groups
  NormTotals totals;
};

/// Returns a meeting about `groups`. LayerMeeting::totals numbers tensors from 0, in the order of the groups. `parts`:
/// the number of equal parts of a group's optimizer state.
LayerMeeting layer_meeting(std::vector<const FlatGroup*> groups, std::size_t parts);
/// Returns the meetings of a step: one about all trainable groups or, with `by_unit`, one for each unit. A unit that
/// does not train has a meeting without groups.
std::vector<LayerMeeting> layer_meetings(const std::vector<std::unique_ptr<Unit>>& units, std::size_t parts,
                                         bool by_unit);

/// Computes the norms that LAMB and LARS compare: the norm of each parameter's weights, and the norm of its update. The
/// sums go over the optimizer parts of all ranks and use the trees of optim/grad_norm.h. So the norms have the same
/// bits with every strategy, whether ranks exchange the norms of all units at once or of one unit at a time.
///
/// The caller calls `begin` for each group, and then `add_weights` and `add_update` for the group's elements from first
/// to last. When all groups (with Options::by_unit: all groups of a unit) are added, all ranks call `agree`.
class LayerNorms {
 public:
  struct Options {
    bool of_updates = false;  ///< whether norms of updates are added too
    bool by_unit = false;     ///< whether ranks agree on the norms of one unit at a time, in backward
  };
  LayerNorms(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement optimizer, const MeshAxes& axes,
             Options options);

  void begin(const FlatGroup& group);
  /// These add fp32 values of the elements from `first` on, counted in the group's flat buffer. Elements that are left
  /// out count as zeros.
  void add_weights(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  void add_update(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  /// Agrees on all norms, or on the norms of the unit with index `unit`. It is collective. Throws tessera::Error.
  /// REQUIRES: a unit is given if and only if Options::by_unit.
  void agree(std::optional<std::int32_t> unit);

  /// These return the norms of the parameter whose FlatParameter::number is `number`. The norms come from the latest
  /// `agree` that included the parameter.
  double weights(std::int64_t number) const;
  double update(std::int64_t number) const;

  /// Returns the seconds spent so far in exchanges with other ranks.
  double seconds() const { return seconds_; }

 private:
  /// Norms of one kind.
  struct Kind {
    std::vector<NormSums> sums;   ///< [group, in unit order]; unused for frozen groups
    std::vector<double> squares;  ///< [FlatParameter::number]
  };
  NormSums& sums_of(Kind& kind, const FlatGroup& group);
  void add(Kind& kind, const FlatGroup& group, std::int64_t first, std::span<const float> values);

  const std::shared_ptr<Collectives> world_;
  const std::vector<int> ranks_with_parts_;
  std::vector<std::size_t> first_of_unit_;
  std::vector<Kind> kinds_;                 ///< norms of weights; also of updates, if these are added
  std::vector<LayerMeeting> meetings_;      ///< one LayerMeeting for all units, or [unit]: one for each unit
  std::vector<double> message_, messages_;  ///< message of this rank; messages of all ranks
  std::vector<double> squares_;             ///< [tensor of LayerMeeting::totals]: the tensor's sum of squares
  std::vector<const double*> parts_;
  double seconds_ = 0;
};

}  // namespace tessera
