#pragma once

// See docs/glossary.md: unit.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "engine/step/agree/gradient_norm.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/unit.h"

namespace tessera {

/// Computes the norms that LAMB and LARS compare: the norm of each parameter's weights, and that of its update. The
/// sums go over the optimizer parts of all ranks and use the trees of optim/grad_norm.h. So every strategy gives the
/// same bits, whether the ranks exchange the norms of all units at once or of one unit at a time.
///
///   begin(group); add_weights(group, ...), add_update(group, ...) from its beginning to its end; for all groups; then
///   agree(): collective
///   or the same for the groups of one unit, then agree(unit)
class LayerNorms {
 public:
  struct Options {
    bool of_updates = false;  ///< whether norms of updates are added too
    bool by_unit = false;     ///< units are agreed on one by one, in backward
  };
  LayerNorms(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement optimizer, const MeshAxes& axes,
             Options options);

  void begin(const FlatGroup& group);
  /// fp32 values of the elements from `first` on, counted in the group's flat buffer. Elements that are left out count
  /// as zeros.
  void add_weights(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  void add_update(const FlatGroup& group, std::int64_t first, std::span<const float> values);
  /// It is collective. Throws tessera::Error. REQUIRES: not Options::by_unit.
  void agree() { agree_on(meetings_.front()); }
  /// Agrees on the norms of one unit. REQUIRES: Options::by_unit.
  void agree(const Unit& unit) { agree_on(meetings_[static_cast<std::size_t>(unit.index)]); }

  /// These return the norms of the parameter with FlatParameter::number `number`, as the latest `agree` on it found
  /// them.
  double weights(std::int64_t number) const;
  double update(std::int64_t number) const;

  /// Returns the seconds spent on meeting the other ranks so far.
  double seconds() const { return seconds_; }

 private:
  /// Norms of one kind.
  struct Kind {
    std::vector<NormSums> sums;   ///< [group, in unit order]; unused for frozen groups
    std::vector<double> squares;  ///< [FlatParameter::number]
  };
  /// The data that ranks exchange at a time: the norms of some trainable groups.
  struct Meeting {
    std::vector<const FlatGroup*> groups;
    std::vector<std::size_t> numbers;  ///< [tensor of `totals`]: FlatParameter::number
    NormTotals totals;
  };
  static Meeting meeting_of(std::vector<const FlatGroup*> groups, std::size_t parts);
  NormSums& sums_of(Kind& kind, const FlatGroup& group);
  void add(Kind& kind, const FlatGroup& group, std::int64_t first, std::span<const float> values);
  void agree_on(const Meeting& meeting);

  const std::shared_ptr<Collectives> world_;
  const std::vector<int> ranks_with_parts_;
  std::vector<std::size_t> first_of_unit_;
  std::vector<Kind> kinds_;                 ///< weights, and updates where they are added
  std::vector<Meeting> meetings_;           ///< a single meeting, or [unit]
  std::vector<double> message_, messages_;  ///< message of this rank; messages of all ranks
  std::vector<double> squares_;             ///< [tensor of a meeting's totals]
  std::vector<const double*> parts_;
  double seconds_ = 0;
};

}  // namespace tessera
