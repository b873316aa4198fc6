#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/records/state_records.h"
#include "engine/memory/state_views.h"
#include "engine/step/agree/learning_rates.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/publisher.h"
#include "engine/step/rules/element_update.h"
#include "engine/step/rules/layerwise_update.h"
#include "engine/step/rules/matrix_update.h"
#include "optim/optimizer.h"
#include "sharding/unit.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group, and makes the new values known to the ranks
/// that hold copies of them. On the CPU; a GPU's is DeviceUpdate.
///
/// Where parameters or states lie in records, steps go through the groups forward and backward by turns: the records that one step
/// used last are those that the next one uses first. Groups of matrices come behind all others: a step that goes forward ends, and one that
/// goes backward begins, with both passes over them. Where gradients lie in records, all steps go forward: backward left those of the
/// first units in memory. So do they where nothing lies in records and values are published behind the update: the next forward wants
/// those of the first units first.
class Update {
 public:
  explicit Update(const StepContext& context);

  using Rates = UpdateRates;

  LearningRates& learning_rates() { return learning_rates_; }
  const LearningRates& learning_rates() const { return learning_rates_; }
  UpdateOptions& options() { return options_; }
  const UpdateOptions& options() const { return options_; }

  /// Backward begins, and the update of all units will follow: the first records of it are read ahead. `order`: the units'
  /// indices in the order in which `apply` will see them, where they are updated in backward.
  void expect(std::span<const int> order);

  /// Between updates in backward: what comes next is read ahead as far as there is room by now.
  void read_ahead();

  /// Updates all units. `used`: as in AgreedStep. A parameter that got no gradient on any rank is left alone, moments and
  /// all, and its bias correction counts only the steps it took part in, as in PyTorch. Its average, once begun, goes on.
  /// `squares`: likewise.
  void apply(const Rates& rates, const std::vector<char>& used, std::span<const double> squares);

  /// Updates one unit in backward. `used`: of its trainable parameters. After the last one: `finish`.
  void apply(Unit& unit, const Rates& rates, std::span<const char> used);
  /// All units are updated, and their values known to all ranks.
  void finish();

  /// Step::swap_averages.
  void swap_averages();

  /// How often each trainable parameter was updated: what its bias correction counts.
  void write_counts(std::map<const c10::TensorImpl*, std::int64_t>& counts) const;
  void read_counts(const std::map<const c10::TensorImpl*, std::int64_t>& counts);

  /// Spent so far on making values known, on exchanging matrices, and on agreeing on norms.
  double communication_seconds() const;

 private:
  using Run = UpdateRun;
  struct Group {
    FlatGroup* group = nullptr;
    std::size_t first_parameter = 0;                 ///< among all trainable ones
    std::size_t begin = 0, end = 0;                  ///< of its runs in this step
    std::array<std::size_t, 2> records_before = {};  ///< by pass: among those announced, with its own
  };
  /// A step's way through the records of one kind.
  struct Pass {
    StateKind kind;
    StateRecords* records;
    std::vector<std::int64_t> order = {};  ///< of this step
  };

  void follow_options();
  std::span<Group> groups_of(const Unit& unit);
  void find_runs(Group& group, std::span<const char> used);
  /// Of groups from `begin` on. `is_first`: of matrices, what MemoryPlan::first_pass_of_matrices() says.
  void announce_runs(std::size_t begin = 0, bool is_first = false);
  void announce(Group& group, Extent run, bool is_first = false);
  void begin_passes();
  template <class Visit>
  void visit_group(const Group& group, const Visit& visit);
  template <class Visit>
  void visit_runs_of(const Group& group, StateUse use, const Visit& visit, StateKind kind = StateKind::kAll);
  void end_records();
  void turn_round();
  bool alternates() const;
  void end_pass();
  bool needs_gradients(const Group& group) const;
  void begin_gradients();
  void hold_gradients(const Group& group);
  void let_gradients_go();
  void update_layerwise(const Rates& rates, std::span<const double> squares);
  void update_elements(const Rates& rates);
  void update_with_matrices(const Rates& rates, const std::vector<char>& used);
  void make_directions(const Rates& rates);
  void visit_masters(const FlatGroup& group, c10::function_ref<void(const StateView&)> visit) const;
  MatrixUpdate::Numbers numbers_of(std::size_t matrix, const Rates& rates, const std::vector<char>& used) const;
  const Optimizer& optimizer_of(const FlatGroup& group, const Run& run) const;
  void update_run(const FlatGroup& group, const OptimizerSlice& slice, const Rates& rates, const Run& run) const;
  template <class Visit>
  void in_direction(std::size_t begin, std::size_t end, const Visit& visit) const;

  const std::vector<std::unique_ptr<Unit>>& units_;
  LearningRates learning_rates_;
  UpdateOptions options_;
  std::uint64_t followed_ = 0;  ///< the options' version that optimizers have
  ElementUpdate elements_;
  std::optional<MatrixUpdate> matrices_;  ///< of groups of matrices, where there are some
  const MemoryPlan::FirstPass first_pass_;
  std::optional<LayerwiseUpdate> layers_;  ///< lamb, lars
  std::array<Pass, 2> passes_;             ///< records are null where there are none
  GradientRecords* gradients_;             ///< likewise
  Unit* held_ = nullptr;                   ///< whose gradients are open
  Publisher publisher_;
  std::vector<std::int64_t> steps_;         ///< applied, by trainable parameter
  std::vector<Group> groups_;               ///< trainable, in unit order, but those of matrices behind all others
  std::size_t first_of_matrices_ = 0;       ///< among groups_
  std::vector<std::size_t> first_of_unit_;  ///< [unit + 1], into groups_; where there are no matrices
  /// Of each dealt matrix: its place among all trainable parameters, and FlatParameter::group.
  std::vector<std::pair<std::size_t, std::size_t>> dealt_;
  std::vector<Run> runs_;  ///< of this step
  Direction direction_ = Direction::kForward;
};

}  // namespace tessera
