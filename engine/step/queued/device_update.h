#pragma once

// See docs/glossary.md: unit.

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/memory/records/mapped_carrier.h"
#include "engine/memory/records/slot_carrier.h"
#include "engine/memory/state_views.h"
#include "engine/step/queued/device_tables.h"
#include "engine/step/queued/host_update.h"
#include "engine/step/queued/own_device_update.h"
#include "engine/step/queued/queued_context.h"
#include "engine/step/queued/queued_layers.h"
#include "engine/step/rules/matrix_update.h"
#include "engine/step/step_walk.h"
#include "optim/rule_optimizer.h"
#include "sharding/unit.h"
#include "tessera/memory.h"

namespace tessera {

/// Applies the optimizer to this rank's part of every trainable group on a GPU, and sends the new values to the ranks
/// that hold copies of them. All work is queued. The device decides whether the step is skipped; the kernels of a
/// skipped step change nothing. StepWalk decides the order of visits, and this class queues the work of each visit. On
/// the CPU, the class Update does the same. QueuedStep owns a DeviceUpdate and calls it from the thread that trains.
///
/// Masters and states in records of the host are updated in one of two ways. Either they are copied to the device and
/// back (SlotCarrier), and one launch updates each record; a skipped step also copies back the records that it brought.
/// Or the host updates them where they lie (HostUpdate), after it has waited for the device's decision. Parameters in
/// records of the host are changed there in both cases (MappedCarrier).
///
/// Some rules go over state twice. A first visit *prepares* a group. Under lamb and muon it writes directions over the
/// group's gradients. Under lamb and lars it adds up the norms of the group's weights. The second visit updates the
/// group; under lamb and muon this update is SGD.
///
/// Under lamb and lars, ranks agree on each parameter's norms between the passes. The norms determine the parameter's
/// rate (QueuedLayers). Under muon, owners make the directions of matrices orthogonal (MatrixUpdate). They do so for
/// all matrices, since the host does not know which matrices are used.
///
/// A rule that the program defines is called for the elements that the device can reach, after the host has waited for
/// the device's decision (OwnDeviceUpdate).
///
/// Under adafactor and own_matrix, owners get gradients, masters and states, and send masters back (TensorRule). If
/// masters are offloaded, the first pass goes over the masters, and the exchange is a part of that pass. The rule gets
/// its numbers from the host, so the host waits for the device's decision before the exchange.
///
/// If units are updated in backward, all of this is done for one unit at a time. "Decision" then means the device's
/// decision at the beginning of the unit.
class DeviceUpdate final : public StepWalk {
 public:
  struct Group {
    FlatGroup* group;
    std::uint32_t first_parameter;  ///< number of the group's first parameter among the parameters of all groups
    DeviceRun run;                  ///< the fields that all runs of the group share

    bool is_of_matrices() const { return !group->matrices.empty(); }
  };

  /// Adds the tables about groups and their parameters to `tables`, in memory of `table_memory`. The caller writes
  /// `used`, `steps` and `decision` of `tables` before the first update. All arguments, and the units' memory, must
  /// outlive this object.
  DeviceUpdate(const QueuedContext& context, const RuleOptimizer& rules, StepTables& tables,
               DeviceTables& table_memory);

  /// Returns the groups that train, in the order of units.
  std::span<const Group> groups() const { return groups_; }
  /// Returns the number of parameters in all groups.
  std::size_t parameters() const { return parameters_; }
  /// Returns the part of a request that stays the same from step to step, until `follow` changes it.
  StepRequest request() const;
  /// Takes the numbers in `options` for the next step.
  void follow(const UpdateOptions& options);
  /// Returns the numbers of parameter groups (OptimizerConfig::groups). Rates that were set by hand are not included.
  std::vector<GroupNumbers> group_numbers() const;
  /// Returns the request for a unit, which names the unit's groups and parameters.
  UnitRequest request_for(const Unit& unit) const;

  /// `fetch` is called when the sum of a unit's gradients is queued. It copies the sum to the host if the host updates
  /// the unit. `forget` is called at the end of a step, and when a step's gradients are dropped. From then on, `fetch`
  /// copies nothing until the last backward of the next step begins.
  void fetch(const Unit& unit);
  void forget();

  /// Updates one unit in backward, by the decision that is valid at that time. `finish` must follow after the last
  /// unit. If the host waits for the decision before an exchange (waits_before_exchange), this function throws
  /// tessera::Error as Step::update does.
  void update(Unit& unit);
  /// Updates all units, unless the decision is to skip the step.
  void update();

  /// Implements Step::swap_averages.
  void swap_averages();
  /// Implements Step::resume. `steps` [trainable parameter]: the number of steps in which the parameter took part.
  void resume(std::span<const std::int64_t> steps);

  /// Returns whether the host waits for the device's decision before tensors are exchanged.
  bool waits_before_exchange() const { return ends_when_skipped(); }

  std::int64_t streamed_bytes() const {
    return (states_ ? states_->uploaded_bytes() : 0) + (matrices_ ? matrices_->streamed_bytes() : 0);
  }
  HostStepBytes host_step() const { return host_ ? host_->copied() : HostStepBytes(); }

 private:
  void fill_groups(StepTables& tables, DeviceTables& memory);
  void fill_group_of_parameters(StepTables& tables, DeviceTables& memory) const;
  void fill_matrices(StepTables& tables, DeviceTables& memory) const;
  void make_layers();
  bool is_muon() const { return matrices_ && matrices_->rule().makes_directions(); }
  bool makes_lamb_directions() const { return makes_direction(rules_.rule()); }
  void report_speed() const;
  /// The decision of the device about the step, and for each parameter whether it is used.
  struct Decided {
    UpdateRates rates;
    std::vector<char> used;
  };

  void announce(std::span<const Visit> visits, bool is_decided) override;
  void end_pass() override;
  bool is_updated(const Visit&) const override { return true; }
  void make(const Visit& visit) override;
  void agree_on_norms() override { layers_->agree(unit_under_way(), request(), tables_); }
  void exchange(std::span<const Visit> visits) override;

  std::size_t index_of(const Visit& visit) const { return static_cast<std::size_t>(visit.group); }
  bool weights_below(const Group& group) const;
  DeviceRun run_of(const Group& group, const StateView& view) const;
  DeviceRun directions_of(const Group& group, const StateView& view) const;
  std::span<const std::int64_t> records_of(std::span<const Visit> visits, StateKind kind);
  template <class Body>
  void visit_memory(const FlatGroup& group, const Visit& visit, const Body& body);
  template <class Body>
  void visit_records(const FlatGroup& group, const Visit& visit, const Body& body);
  template <class ViewOf, class Body>
  void visit_pieces(const FlatGroup& group, Extent run, const Visit& visit, const ViewOf& view_of, const Body& body);
  void visit_masters(const FlatGroup& group, const Visit& visit, c10::function_ref<void(const StateView&)> body);
  void prepare(const Visit& visit);
  template <class Launch, class OnHost>
  void pass_over(const Visit& visit, const Launch& launch, const OnHost& on_host);
  void launch_update(std::size_t group, const StateView& view);
  StepDecision wait_for_decision();
  void begin(std::span<const Group> groups);
  std::span<const Group> groups_of(const Unit& unit) const;

  const QueuedContext context_;
  const RuleOptimizer& rules_;
  const StepTables& tables_;
  std::vector<OptimizerConfig> configs_;  ///< numbers of the next step; [0]: for parameters in no group; [1 + i]: for
                                          ///< those of group i
  std::vector<Group> groups_;
  std::size_t parameters_ = 0;
  std::vector<std::int64_t> steps_;         ///< [trainable parameter]: number of steps in which it took part; empty
                                            ///< unless the rule updates whole tensors
  std::unique_ptr<MatrixUpdate> matrices_;  ///< null if no group has matrices
  std::unique_ptr<OwnDeviceUpdate> own_;    ///< null if the program defines no rule
  std::unique_ptr<QueuedLayers> layers_;    ///< null unless the rule is lamb or lars
  SlotCarrier* const states_;               ///< null if all state is in the device's memory, or is updated on the host
  std::unique_ptr<HostUpdate> host_;        ///< null if no state is updated on the host
  MappedCarrier* const mapped_;             ///< null if all parameters are in the device's memory
  /// The decision for this step, or for the unit in backward, if the host waits for it and does not skip the step.
  std::optional<Decided> decided_;
  std::vector<std::int64_t> order_;  ///< the records of one kind that a pass visits
};

}  // namespace tessera
