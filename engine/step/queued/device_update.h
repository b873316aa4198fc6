#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/records/device_gradients.h"
#include "engine/memory/records/mapped_records.h"
#include "engine/memory/records/state_stream.h"
#include "engine/memory/state_views.h"
#include "engine/step/publisher.h"
#include "engine/step/queued/device_tables.h"
#include "engine/step/queued/host_update.h"
#include "engine/step/queued/own_device_update.h"
#include "engine/step/queued/queued_context.h"
#include "engine/step/queued/queued_layers.h"
#include "engine/step/rules/matrix_update.h"
#include "optim/rule_optimizer.h"
#include "sharding/unit.h"
#include "tessera/memory.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group on a GPU, and makes the new values known to the ranks that hold copies
/// of them. All of it is queued; whether the step is skipped the device alone knows, and its kernels change nothing then. The CPU's is Update.
///
/// Masters and states in records of the host go through the device (StateStream), where one launch updates each; a step that is
/// skipped takes back what it brought. Or the host updates them where they lie (HostUpdate): then it waits for the device's decision.
/// Parameters in records of the host are changed there in either case (MappedRecords).
///
/// Some rules go over state twice. A first pass *prepares* a group: under lamb and muon directions take the place of its gradients, and under
/// lamb and lars norms of its weights are added up. What follows is an update, under lamb and muon by SGD. Where records are in files, the
/// second pass goes backward, and finds the last ones of the first in memory; the order is Update's, and so is what moves.
///
/// Under lamb and lars ranks agree on each parameter's norms between the passes, and its rate is known (QueuedLayers). Under muon owners make
/// directions of matrices orthogonal there (MatrixUpdate): of all matrices, used or not, since the host does not know which are.
///
/// A program's own rule is called for what the device reaches, once the host has waited for its decision (OwnDeviceUpdate).
///
/// Under adafactor and own_matrix owners get gradients, masters and states, and what comes back are masters (TensorRule). Where masters lie below
/// the device's memory, the first pass is one over them, and the exchange a part of it. The rule gets numbers: so the host waits for the
/// device's decision before that.
class DeviceUpdate {
 public:
  struct Group {
    FlatGroup* group;
    std::uint32_t first_parameter;  ///< among those of all groups
    DeviceRun run;                  ///< what all runs of it have

    bool is_of_matrices() const { return !group->matrices.empty(); }
  };

  /// `tables`: what groups and their parameters say is written there, into memory of `table_memory`; of the rest `used`, `steps` and
  /// `decision` are there before the first update. All of these, and what the units have, outlive this.
  DeviceUpdate(const QueuedContext& context, const RuleOptimizer& rules, StepTables& tables,
               DeviceTables& table_memory);

  /// That train, in the order of units.
  std::span<const Group> groups() const { return groups_; }
  /// Of all groups.
  std::size_t parameters() const { return parameters_; }
  /// What of a request does not change from step to step, but by `follow`.
  StepRequest request() const;
  /// From the next step on, these numbers.
  void follow(const UpdateOptions& options);
  /// The numbers of parameter groups (OptimizerConfig::groups), without rates set by hand.
  std::vector<GroupNumbers> group_numbers() const;
  /// Of a unit: which groups and parameters it has.
  UnitRequest request_for(const Unit& unit) const;

  /// A step's last backward begins, and the update of all units will follow: the first records of it are brought. `order`: the units'
  /// indices in the order of `update_unit`, where they are updated in backward.
  void expect(std::span<const int> order);
  /// The sum of a unit's gradients is queued: where the host updates, they are copied. `forget`: those to come are no step's.
  void fetch(const Unit& unit);
  void forget();

  /// Updates one unit in backward, as the decision is by then. After the last one: `finish`.
  void update_unit(const Unit& unit);
  /// All units are updated, and their values known to all ranks.
  void finish();
  /// Updates all units, as the decision is.
  void update();

  /// Step::swap_averages.
  void swap_averages();
  /// Step::resume: of each parameter, in how many steps it took part.
  void resume(std::span<const std::int64_t> steps);

  std::int64_t streamed_bytes() const {
    return (stream_ ? stream_->streamed_bytes() : 0) + (matrices_ ? matrices_->streamed_bytes() : 0);
  }
  HostStepBytes host_step() const { return host_ ? host_->copied() : HostStepBytes(); }

 private:
  void fill_groups(StepTables& tables, DeviceTables& memory);
  void fill_group_of_parameters(StepTables& tables, DeviceTables& memory) const;
  void fill_matrices(StepTables& tables, DeviceTables& memory) const;
  void make_layers();
  bool is_muon() const { return matrices_ && matrices_->makes_directions(); }
  bool makes_lamb_directions() const { return rules_.rule() == StepRule::kLamb; }
  void report_speed() const;
  /// What a pass does with which group.
  struct Turn {
    std::size_t group;
    bool prepares = false;
  };
  bool weights_below(const Group& group) const;
  enum class Which { kAll, kElements, kMatrices };
  std::vector<Turn> turns(Which which, bool prepares = false) const;
  std::vector<Turn> turns_of(std::span<const int> units) const;
  std::vector<Turn> first_pass() const;
  DeviceRun run_of(const Group& group, const StateView& view) const;
  DeviceRun directions_of(const Group& group, const StateView& view) const;
  void begin_records(std::span<const Turn> turns);
  void end_records();
  template <class Visit>
  void visit_memory(const FlatGroup& group, bool with_parameters, StateUse use, const Visit& visit);
  template <class Visit>
  void visit_records(const FlatGroup& group, bool with_parameters, StateUse use, const Visit& visit);
  template <class ViewOf, class Visit>
  void visit_pieces(const FlatGroup& group, Extent run, bool with_parameters, StateUse use, const ViewOf& view_of,
                    const Visit& visit);
  void visit_masters(const FlatGroup& group, c10::function_ref<void(const StateView&)> visit);
  void prepare(std::size_t index);
  template <class Launch, class OnHost>
  void pass_over_all(const Launch& launch, const OnHost& on_host);
  template <class Launch, class OnHost>
  void pass_over_group(std::size_t index, const Launch& launch, const OnHost& on_host);
  template <class Launch>
  void pass_over(std::span<const Turn> turns, const Launch& launch);
  void update_with_matrices();
  void adapt_layers();
  void launch_update(std::size_t group, const StateView& view);
  /// What the device decided of the step, and who is used: [parameter].
  struct Decided {
    UpdateRates rates;
    std::vector<char> used;
  };
  std::optional<Decided> wait_for_decision() const;
  std::optional<Decided> decision_for_host();
  void begin_own(std::span<const Turn> turns, const Decided& decided);
  void launch_own(std::size_t group, const StateView& view, const std::optional<Decided>& decided);
  void begin_gradients();
  bool needs_gradients(const Group& group) const;
  void hold_gradients(const Group& group);
  void let_gradients_go();
  bool alternates() const;

  const QueuedContext context_;
  const RuleOptimizer& rules_;
  const StepTables& tables_;
  Publisher publisher_;
  std::vector<OptimizerConfig> configs_;  ///< of what is in no group, then of each group: the numbers of the next step
  std::vector<Group> groups_;
  std::size_t parameters_ = 0;
  /// Under rules of whole tensors: in how many steps each parameter took part; and of each dealt matrix, which of them it is.
  std::vector<std::int64_t> steps_;
  struct Dealt {
    std::size_t parameter, group;  ///< among all that train; FlatParameter::group
  };
  std::vector<Dealt> dealt_;
  std::unique_ptr<MatrixUpdate> matrices_;  ///< null where no group is one of matrices
  std::unique_ptr<OwnDeviceUpdate> own_;    ///< null where the program brings no rule
  std::unique_ptr<QueuedLayers> layers_;    ///< under lamb and lars; else null
  std::unique_ptr<StateStream> stream_;     ///< null where all state is in the device's memory, or updated on the host
  std::unique_ptr<HostUpdate> host_;        ///< null where no state is updated on the host
  std::unique_ptr<MappedRecords> mapped_;   ///< null where all parameters are in the device's memory
  const std::shared_ptr<DeviceGradients> gradients_;  ///< null where all gradients are
  bool updates_ = false;                              ///< the pass under way is an update
  Unit* held_ = nullptr;                              ///< whose gradients are open
  Direction direction_ = Direction::kForward;         ///< of the next pass over records in files
  bool elements_come_last_ = false;                   ///< in the next step, behind matrices
  std::vector<std::int64_t> order_;                   ///< of a pass, of one kind of records
};

}  // namespace tessera
