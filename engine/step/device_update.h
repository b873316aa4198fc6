#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/device_gradients.h"
#include "engine/memory/mapped_records.h"
#include "engine/memory/state_stream.h"
#include "engine/memory/state_views.h"
#include "engine/memory/training_memory.h"
#include "engine/step/device_tables.h"
#include "engine/step/host_update.h"
#include "engine/step/learning_rates.h"
#include "engine/step/matrix_update.h"
#include "engine/step/own_device_update.h"
#include "engine/step/publisher.h"
#include "engine/step/queued_layers.h"
#include "optim/device_kernels.h"
#include "optim/rule_optimizer.h"
#include "runtime/comm/mesh_groups.h"
#include "sharding/compute_device.h"
#include "sharding/unit.h"
#include "tessera/memory.h"
#include "tessera/strategy.h"

namespace tessera {

/// Applies the optimizer to every rank's part of every trainable group on a GPU, and makes the new values known to the ranks that hold copies
/// of them. All of it is queued; whether the step is skipped the device alone knows, and its kernels change nothing then. The CPU's is Update.
///
/// Masters and states in records of the host go through the device (StateStream), where one launch updates each; a step that is
/// skipped takes back what it brought. Or the host updates them where they lie (HostUpdate): then it waits for the device's decision.
/// Parameters in records of the host are changed there in either case (MappedRecords).
///
/// Under lamb and lars ranks agree on each parameter's norms before its rate is known (QueuedLayers). lamb's directions take the place of the
/// gradients by then, and what follows is a step of SGD.
///
/// A program's own rule is called for what the device has, once the host has waited for its decision (OwnDeviceUpdate).
///
/// Under muon, directions of matrices take the place of their gradients, owners make them orthogonal (MatrixUpdate), and what comes back is
/// what an update by SGD takes. All matrices are exchanged, used or not, since the host does not know which are.
///
/// Under adafactor and own_matrix owners get gradients, masters and states, and what comes back are masters (TensorRule). The rule gets
/// numbers: so the host waits for the device's decision before that.
class DeviceUpdate {
 public:
  struct Group {
    FlatGroup* group;
    std::uint32_t first_parameter;  ///< among those of all groups
    DeviceRun run;                  ///< of this rank's optimizer part, as much of it as lies in the device's memory
    /// Of matrices: momenta, with the gradient's place for what becomes orthogonal. Under lamb: moments, with that place for directions.
    DeviceRun directions = {};

    bool is_of_matrices() const { return !group->matrices.empty(); }
  };

  /// `tables`: what groups and their parameters say is written there, into memory of `table_memory`; of the rest `used`, `steps` and
  /// `decision` are there before the first update. All of these, and what the units have, outlive this.
  DeviceUpdate(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const RuleOptimizer& rules,
               const MemoryPlan& plan, const MeshAxes& axes, const TrainingMemory& memory, const LearningRates& rates,
               const OwnRules& own_rules, DeviceKernels& kernels, ComputeDevice device, StepTables& tables,
               DeviceTables& table_memory);

  /// That train, in the order of units.
  std::span<const Group> groups() const { return groups_; }
  /// Of all groups.
  std::size_t parameters() const { return parameters_; }
  /// What of a request does not change from step to step.
  StepRequest request() const;
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

  std::int64_t streamed_bytes() const { return stream_ ? stream_->streamed_bytes() : 0; }
  HostStepBytes host_step() const { return host_ ? host_->copied() : HostStepBytes(); }

 private:
  void fill_groups(StepTables& tables, DeviceTables& memory);
  void fill_group_numbers(StepTables& tables, DeviceTables& memory) const;
  void fill_matrices(StepTables& tables, DeviceTables& memory);
  void fill_layers(const std::vector<std::unique_ptr<Unit>>& units);
  bool is_muon() const { return matrices_ && matrices_->makes_directions(); }
  bool makes_lamb_directions() const { return rules_.rule() == StepRule::kLamb; }
  void report_speed(const MeshAxes& axes) const;
  std::vector<std::size_t> groups_in_order() const;
  std::vector<std::size_t> groups_of(std::span<const int> units) const;
  DeviceRun run_of(const Group& group, const StateView& view) const;
  void announce_records(std::span<const std::size_t> order);
  template <class Launch, class OnHost>
  void pass_over_all(const Launch& launch, const OnHost& on_host);
  template <class Launch, class OnHost>
  void pass_over_group(std::size_t index, const Launch& launch, const OnHost& on_host);
  template <class Launch, class ViewOf>
  void launch_pieces(const Group& group, Extent run, const Launch& launch, const ViewOf& view_of);
  void update_by_muon();
  void update_matrices_by_rule();
  template <class Launch>
  void pass_over_groups(bool of_matrices, const Launch& launch);
  void adapt_layers();
  void update_by_own_rule();
  /// What the device decided of the step, and who is used: [parameter].
  struct Decided {
    UpdateRates rates;
    std::vector<char> used;
  };
  std::optional<Decided> wait_for_decision() const;
  std::optional<UpdateRates> begin_on_host();
  void begin_gradients();
  bool needs_gradients(const Group& group) const;
  void hold_gradients(const Group& group);
  void let_gradients_go();
  bool alternates() const;

  const MemoryPlan& plan_;
  const std::shared_ptr<const MeshAxes> axes_;
  const Strategy& strategy_;
  const RuleOptimizer& rules_;
  DeviceKernels& kernels_;
  const ComputeDevice device_;
  const StepTables& tables_;
  Publisher publisher_;
  const LearningRates& rates_;
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
  std::vector<std::int64_t> order_;                   ///< of a pass, of one kind of records
};

}  // namespace tessera
