#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/memory/state_records.h"
#include "engine/memory/state_views.h"
#include "engine/step/publisher.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group, and makes the new values known to the ranks
/// that hold copies of them. On the CPU; a GPU's is QueuedStep.
///
/// Where states lie in records, steps go through the groups forward and backward by turns: the records that one step
/// used last are those that the next one uses first.
class Update {
 public:
  /// `records`: of the states that lie below memory, or null.
  Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
         const MeshAxes& axes, StateRecords* records);

  /// `used`: as in AgreedStep. A parameter that got no gradient on any rank is left alone, moments and all, and its
  /// bias correction counts only the steps it took part in, as in PyTorch.
  void apply(float gradient_scale, float lr, const std::vector<char>& used);

  /// How often each trainable parameter was updated: what its bias correction counts.
  void write_counts(std::map<const c10::TensorImpl*, std::int64_t>& counts) const;
  void read_counts(const std::map<const c10::TensorImpl*, std::int64_t>& counts);

  /// Spent so far on making values known.
  double publish_seconds() const { return publisher_.seconds(); }

 private:
  /// A run of elements that have taken part in equally many steps.
  struct Run {
    Extent extent;
    std::int64_t step = 0;  ///< this one, counted from 1
  };
  struct Group {
    FlatGroup* group = nullptr;
    std::size_t first_parameter = 0;  ///< among all trainable ones
    std::size_t begin = 0, end = 0;   ///< of its runs in this step
  };

  void find_runs(const std::vector<char>& used);
  void announce_records();
  void update_run(const FlatGroup& group, const StepScalars& scalars, Extent run) const;
  template <class Visit>
  void in_direction(std::size_t begin, std::size_t end, const Visit& visit) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  const Optimizer& optimizer_;
  StateRecords* const records_;
  Publisher publisher_;
  std::vector<std::int64_t> steps_;  ///< applied, by trainable parameter
  std::vector<Group> groups_;        ///< trainable
  std::vector<Run> runs_;            ///< of this step
  Direction direction_ = Direction::kForward;
  std::vector<std::int64_t> order_;  ///< of this step's records
};

}  // namespace tessera
