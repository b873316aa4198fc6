#pragma once

// See docs/glossary.md: unit.

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/records/tier_carrier.h"
#include "engine/memory/state_views.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/rules/layerwise_update.h"
#include "engine/step/rules/matrix_update.h"
#include "engine/step/step_walk.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group, and makes the new values known to the ranks
/// that hold copies of them. It works on the CPU; DeviceUpdate does the same on a GPU. StepWalk decides the order of
/// visits. This class does the work of one visit, run by run. Once a step is decided, it announces only the records of
/// these runs, so that records of unused parameters are not read. CpuStep owns an Update and calls it from the thread
/// that trains.
class Update final : public StepWalk {
 public:
  explicit Update(const StepContext& context);

  using Rates = UpdateRates;

  LearningRates& learning_rates() { return learning_rates_; }
  const LearningRates& learning_rates() const { return learning_rates_; }
  UpdateOptions& options() { return options_; }
  const UpdateOptions& options() const { return options_; }

  /// It is called between updates in backward. It reads ahead the state that the next updates need, as far as there is
  /// memory.
  void read_ahead();

  /// Updates all units. `used`: as in AgreedStep. A parameter that got no gradient on any rank does not change, nor do
  /// its moments. As in PyTorch, its bias correction counts only the steps in which it took part. The parameter's
  /// average is still updated, once the average has begun. `squares`: as in AgreedStep.
  void apply(const Rates& rates, std::span<const char> used, std::span<const double> squares);

  /// Updates one unit in backward. `used`: for each trainable parameter of the unit, whether it is used. Call `finish`
  /// after the last unit.
  void apply(Unit& unit, const Rates& rates, std::span<const char> used);

  /// Implements Step::swap_averages.
  void swap_averages();

  /// Writes the number of updates of each trainable parameter, which its bias correction uses.
  void write_counts(std::map<const c10::TensorImpl*, std::int64_t>& counts) const;
  void read_counts(const std::map<const c10::TensorImpl*, std::int64_t>& counts);

  /// Returns the seconds that were spent so far on publishing values, exchanging matrices, and agreeing on norms.
  double communication_seconds() const;

 private:
  using Run = UpdateRun;
  struct Group {
    FlatGroup* group = nullptr;
    std::size_t first_parameter = 0;  ///< number of the group's first parameter among all trainable parameters
    std::size_t begin = 0, end = 0;   ///< range of the group's runs in runs_, in this step
  };
  /// A pass through the records of one kind.
  struct Pass {
    StateKind kind;
    TierCarrier* records;                  ///< null if there are no such records
    std::vector<std::int64_t> order = {};  ///< records in the order in which they were announced
    std::vector<std::size_t> ends = {};    ///< [group]: index in `order` of the end of the group's records
  };

  void announce(std::span<const Visit> visits, bool is_decided) override;
  void end_pass() override;
  bool is_updated(const Visit& visit) const override;
  void make(const Visit& visit) override;
  void agree_on_norms() override;
  void exchange(std::span<const Visit> visits) override;

  void follow_options();
  void find_runs(Group& group, std::span<const char> used);
  std::span<Group> groups_of(const Unit& unit);
  const Group& group_of(const Visit& visit) const { return groups_[static_cast<std::size_t>(visit.group)]; }
  template <class Body>
  void for_runs(const Visit& visit, const Body& body) const;
  template <class Body>
  void for_slices(const Visit& visit, const Body& body) const;
  void append_to(Pass& pass, const Visit& visit, bool is_decided) const;
  void pass_over_unused(const Visit& visit);
  const Optimizer& optimizer_of(const FlatGroup& group, const Run& run) const;
  void update_run(const FlatGroup& group, const OptimizerSlice& slice, const Run& run) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  LearningRates learning_rates_;
  UpdateOptions options_;
  std::uint64_t followed_ = 0;  ///< version of the options that optimizers use
  ElementUpdate elements_;
  std::optional<MatrixUpdate> matrices_;   ///< set if there are groups of matrices
  std::optional<LayerwiseUpdate> layers_;  ///< set under lamb and lars
  std::array<Pass, 2> passes_;
  std::vector<std::int64_t> steps_;  ///< applied steps of each trainable parameter
  std::vector<Group> groups_;        ///< trainable groups, in unit order
  // The next members are the arguments of this step, and its runs.
  Rates rates_;
  std::span<const char> used_;
  std::vector<char> used_in_backward_;  ///< `used_` of the units that backward has updated so far
  std::span<const double> squares_;
  std::vector<Run> runs_;
};

}  // namespace tessera
