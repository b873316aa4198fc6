#include "engine/step/queued/device_update.h"

#include <algorithm>
#include <string>

#include "engine/step/agree/step_outcome.h"
#include "optim/master_assigner.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_names.h"
#include "sharding/host_view.h"
#include "tessera/span.h"

namespace tessera {

// This file queues the kernels of one visit after another.
//
// The constructor and the `fill_...` functions write the tables that kernels read. `make` chooses by the visit's work:
// `prepare` makes a first pass, and `pass_over` an update. Both go over the pieces in the device's memory
// (`visit_memory`) and over those in records (`visit_records`), and launch a kernel for each. A record is acquired
// before its launch and given back after it; the carriers order copies and launches. The host waits for the device only
// if it needs the decision itself (`wait_for_decision`).

namespace {

/// Returns the numbers for kernels. If the rule is computed elsewhere, these are the numbers of SGD.
RuleNumbers numbers_of(const OptimizerConfig& config, bool is_own) {
  return rule_numbers(is_own || has(config.type, optimizer_traits::kTensors) ? sgd_without_states(config) : config);
}

}  // namespace

DeviceUpdate::DeviceUpdate(const QueuedContext& context, const RuleOptimizer& rules, StepTables& tables,
                           DeviceTables& table_memory)
    : StepWalk(context, context.device.waits),
      context_(context),
      rules_(rules),
      tables_(tables),
      states_(context.memory.gpu.states.get()),
      mapped_(context.memory.gpu.parameters.get()) {
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  if (!context.plan.passes().matrices.batches().empty()) {
    matrices_ = std::make_unique<MatrixUpdate>(
        context, make_tensor_rule(optimizer, context.own_rules, context.device.device, &context.kernels),
        context.device, &context.kernels);
  }
  const UpdateOptions as_in_the_strategy(optimizer);
  configs_.push_back(as_in_the_strategy.of(FlatParameter::kNoGroup));
  for (std::size_t i = 0; i < optimizer.groups.size(); ++i) configs_.push_back(as_in_the_strategy.of(i));
  for_each_trainable(context.units, [&](FlatGroup& group) {
    DeviceRun run;
    run.rule = rules.rule();
    run.group = static_cast<std::uint32_t>(groups_.size());
    run.parameters = static_cast<std::uint32_t>(group.layout.size());
    groups_.push_back({&group, static_cast<std::uint32_t>(parameters_), run});
    parameters_ += group.parameters.size();
  });
  if (matrices_ && !is_muon()) steps_.resize(parameters_);
  if (optimizer.type == OptimizerType::kOwn)
    own_ = std::make_unique<OwnDeviceUpdate>(context, groups_.size(), parameters_);
  fill_groups(tables, table_memory);
  fill_group_of_parameters(tables, table_memory);
  fill_matrices(tables, table_memory);
  if (adapts_layers(optimizer.type)) make_layers();
  if (context.plan.passes().steps_on_host) host_ = std::make_unique<HostUpdate>(context);
  if (states_ && !states_->are_in_files()) report_speed();
}

StepRequest DeviceUpdate::request() const {
  StepRequest request;
  request.rule = rules_.rule();
  request.numbers = numbers_of(configs_[0], own_ != nullptr);
  request.trust_coefficient = context_.strategy.optimizer.trust_coefficient;
  if (is_muon()) request.of_matrices = matrices_->rule().muon_of(FlatParameter::kNoGroup).step_numbers();
  return request;
}

/// Logs the speed of copies, for users who consider a smaller offloaded fraction, which takes more memory of the
/// device.
void DeviceUpdate::report_speed() const {
  constexpr std::int64_t kMeasuredBytes = std::int64_t{64} << 20;
  const double bytes_per_second = states_->measure(kMeasuredBytes);  // all ranks at once: they may share the bus
  if (context_.axes.world->rank() != 0) return;
  const std::int64_t streamed = context_.plan.records().streamed_bytes;
  log_info("masters and moments in host memory are streamed at " +
           format_bytes(static_cast<std::int64_t>(bytes_per_second)) + "/s each way, measured now: a step takes " +
           std::to_string(static_cast<double>(streamed) / bytes_per_second) + " s for " + format_bytes(streamed));
}

/// Returns `group.run` for the elements of the view.
DeviceRun DeviceUpdate::run_of(const Group& group, const StateView& view) const {
  const OptimizerSlice slice = optimizer_slice(*group.group, view);
  DeviceRun run = group.run;
  if (group.is_of_matrices()) {
    run.rule = StepRule::kSgd;
    run.takes_direction = true;
    run.arguments = matrices_->rule().step_arguments(slice);
  } else {
    run.arguments = rules_.arguments(own_ ? own_->without_states(slice) : slice);
    run.arguments.clip_value = static_cast<float>(context_.strategy.gradient_clip_value);
  }
  if (makes_lamb_directions()) {
    run.rule = StepRule::kSgd;
    run.takes_direction = true;
    for (StateArgument& state : run.arguments.states) state = {};
    run.arguments.clip_value = 0;
  }
  run.stream = slice.stream;
  run.first_element = slice.first_element;
  return run;
}

/// Returns the run that computes directions from the view's momenta (muon), or from its moments and weights (lamb).
/// Directions are written over the gradients.
DeviceRun DeviceUpdate::directions_of(const Group& group, const StateView& view) const {
  const OptimizerSlice slice = optimizer_slice(*group.group, view);
  const std::span<float> place = gradients_of(*group.group, slice);
  DeviceRun run = group.run;
  if (is_muon()) {
    run.arguments = matrices_->rule().muon_of(FlatParameter::kNoGroup).direction_arguments(slice, place);
  } else {
    run.direction = place.data();
    run.arguments = rules_.arguments(slice);
    run.arguments.average = {};
  }
  run.arguments.clip_value = static_cast<float>(context_.strategy.gradient_clip_value);
  run.stream = slice.stream;
  run.first_element = slice.first_element;
  return run;
}

/// Writes the tables that say where parameters begin.
void DeviceUpdate::fill_groups(StepTables& tables, DeviceTables& memory) {
  std::vector<StepGroup> groups;
  for (Group& g : groups_) {
    const Layout& layout = g.group->layout;
    std::uint32_t parameter = g.first_parameter;
    groups.push_back({parameter, g.run.parameters});
    std::vector<ParameterBegin> begins;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const auto offset = static_cast<std::uint64_t>(layout.extent(i).offset);
      begins.push_back({static_cast<std::uint32_t>(offset / kParameterAlign), parameter++});
    }
    g.run.begins = memory.put<ParameterBegin>(begins);
  }
  tables.parameters = static_cast<int>(parameters_);
  tables.groups = static_cast<int>(groups_.size());
  tables.group = memory.put<StepGroup>(groups);
}

void DeviceUpdate::follow(const UpdateOptions& options) {
  for (std::size_t i = 0; i < configs_.size(); ++i) configs_[i] = options.of(i - 1);
  if (matrices_) matrices_->follow(options);
  if (own_) own_->follow(options);
  if (host_) host_->follow(options);
}

std::vector<GroupNumbers> DeviceUpdate::group_numbers() const {
  std::vector<GroupNumbers> numbers;
  for (const ParameterGroup& group : context_.strategy.optimizer.groups) {
    const OptimizerConfig& config = configs_[1 + numbers.size()];
    GroupNumbers& added = numbers.emplace_back(GroupNumbers{numbers_of(config, own_ != nullptr), group.lr_ratio});
    added.adapts_layers = group.layer_adaptation;
    if (is_muon()) added.of_matrices = matrices_->rule().muon_of(numbers.size() - 1).step_numbers();
  }
  return numbers;
}

/// Writes, for each parameter, 1 + the index of its group in OptimizerConfig::groups, or 0 if it is in no group.
void DeviceUpdate::fill_group_of_parameters(StepTables& tables, DeviceTables& memory) const {
  if (context_.strategy.optimizer.groups.empty()) return;
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  std::vector<std::uint32_t> number;
  for (const Group& g : groups_) {
    for (const FlatParameter& parameter : g.group->parameters) {
      number.push_back(static_cast<std::uint32_t>(parameter.group + 1));
    }
  }
  tables.group_number = memory.put<std::uint32_t>(number);
}

/// Writes the tables that the kernels of muon read.
void DeviceUpdate::fill_matrices(StepTables& tables, DeviceTables& memory) const {
  if (!is_muon()) return;
  std::vector<std::uint8_t> is_matrix;
  for (const Group& g : groups_) is_matrix.insert(is_matrix.end(), g.run.parameters, g.is_of_matrices() ? 1 : 0);
  tables.is_matrix = memory.put<std::uint8_t>(is_matrix);
}

/// Returns whether some weights of the group are offloaded. If norms are needed, all weights of such a group are
/// copied.
bool DeviceUpdate::weights_below(const Group& group) const {
  const FlatGroup& flat = *group.group;
  return context_.plan.weights_below(
      context_.plan.units()[static_cast<std::size_t>(flat.unit->index)].groups[flat.index]);
}

/// Makes `layers_`, which computes the norms of lamb and lars.
void DeviceUpdate::make_layers() {
  // `bare` works on slices that have weights and no states.
  const RuleOptimizer bare(sgd_without_states(context_.strategy.optimizer), EmaConfig());
  std::vector<QueuedLayers::Part> parts;
  for (const Group& g : groups_) {
    OptimizerSlice slice = optimizer_slice(*g.group, states_in_memory(*g.group, g.group->optimizer_part));
    slice.states = {};
    const bool is_copied = weights_below(g);
    parts.push_back({g.group, is_copied ? StepArguments() : bare.arguments(slice), is_copied});
  }
  const LayerNorms::Options options{.of_updates = updates_in_backward() || makes_lamb_directions(),
                                    .by_unit = updates_in_backward()};
  layers_ = std::make_unique<QueuedLayers>(context_, parts, options);
}

void DeviceUpdate::fetch(const Unit& unit) {
  if (host_) host_->fetch(unit);
}

void DeviceUpdate::forget() {
  if (host_) host_->expect(/*sums_of_step=*/false);
}

/// Returns the groups of a unit. `groups_` is in the order of units.
std::span<const DeviceUpdate::Group> DeviceUpdate::groups_of(const Unit& unit) const {
  return std::ranges::equal_range(groups_, unit.index, {}, [](const Group& g) { return g.group->unit->index; });
}

UnitRequest DeviceUpdate::request_for(const Unit& unit) const {
  const std::span<const Group> groups = groups_of(unit);
  const Group &first = groups.front(), &last = groups.back();
  UnitRequest request;
  request.unit = unit.index;
  request.first_group = first.run.group;
  request.groups = static_cast<std::uint32_t>(groups.size());
  request.first_parameter = first.first_parameter;
  request.parameters = last.first_parameter + last.run.parameters - first.first_parameter;
  return request;
}

/// The host waits for the decision if it makes updates itself, or queues the updates of a program's rule. It also waits
/// if a skipped step ends at the decision, so that all ranks know here that the step is skipped. Otherwise even a
/// skipped step copies records to the device and back, and makes the collectives that publish values.
void DeviceUpdate::update() {
  if (host_) host_->fetch_parameters();
  if (host_ || own_ || ends_when_skipped()) {
    wait_for_decision();
    if (!decided_ && ends_when_skipped()) return;
  }
  if (host_ && decided_) host_->begin(decided_->used);
  begin(groups_);
  update_all();
}

/// Begins the step of those groups whose rules get their numbers from the host.
void DeviceUpdate::begin(std::span<const Group> groups) {
  if (!decided_) return;
  for (const Group& g : groups) {
    if (own_) own_->begin(g.run.group, *g.group, g.first_parameter, decided_->used);
    const std::size_t end = steps_.empty() ? 0 : g.first_parameter + g.run.parameters;
    for (std::size_t p = g.first_parameter; p < end; ++p) steps_[p] += decided_->used[p] != 0;
  }
}

/// If gradients are sent to owners, and this rank has a gradient that is not finite, the step ends here, as on the CPU.
/// Otherwise the owners' rules would use this gradient.
void DeviceUpdate::update(Unit& unit) {
  if (own_ || waits_before_exchange()) {
    const StepDecision found = wait_for_decision();
    const bool is_over = waits_before_exchange() && !decided_;
    if (is_over && found.gathers_differ) throw_disagreement_in_backward(unit.name);
    if (is_over) throw_not_finite_in_backward("", "unit " + unit.name);
  }
  begin(groups_of(unit));
  update_unit(unit);
}

void DeviceUpdate::swap_averages() {
  if (host_) {
    host_->fetch_parameters();
    host_->begin(std::vector<char>(parameters_));
  }
  swap();
}

/// Waits for the device's decision, and stores it in `decided_` unless the step is skipped.
StepDecision DeviceUpdate::wait_for_decision() {
  const Span span("wait for the device's decision");
  decided_.reset();
  StepDecision decision{};
  fetch_state(&decision, tables_.decision, sizeof decision, context_.device.device);
  throw_if_error(context_.axes.status());
  if (decision.is_skipped) return decision;
  Decided& decided = decided_.emplace();
  decided.rates = {decision.gradient_scale, static_cast<float>(context_.strategy.gradient_clip_value), decision.lr,
                   is_first_of_run(decision, tables_.updates_in_backward)};
  decided.used.resize(parameters_);
  fetch_state(decided.used.data(), tables_.used, static_cast<std::int64_t>(parameters_), context_.device.device);
  return decision;
}

/// Returns the records of whole groups, since the host does not know which parameters are used.
std::span<const std::int64_t> DeviceUpdate::records_of(std::span<const Visit> visits, StateKind kind) {
  order_.clear();
  for (const Visit& visit : visits) {
    const FlatGroup& flat = *groups_[index_of(visit)].group;
    if (access_of(visit, kind) == Access::kNone) continue;
    append_records(flat, kind, flat.optimizer_part, direction_of(visit), order_);
  }
  return order_;
}

void DeviceUpdate::announce(std::span<const Visit> visits, bool is_decided) {
  if (matrices_ && !is_decided) matrices_->expect(unit_of(visits));
  if (host_ && !is_decided) host_->expect(/*sums_of_step=*/true);
  if (states_) states_->announce(records_of(visits, StateKind::kMastersAndStates));
  if (mapped_) mapped_->announce(records_of(visits, StateKind::kParameters));
}

void DeviceUpdate::end_pass() {
  if (states_) states_->flush();
  if (mapped_) mapped_->flush();
}

/// Calls `body` for the pieces of `run` whose parameters lie in memory or in one record, or for the whole run if
/// parameters are not needed. `view_of(piece)` has the piece's masters and states. `visit` says whether `body` reads or
/// writes the parameters.
template <class ViewOf, class Body>
void DeviceUpdate::visit_pieces(const FlatGroup& group, Extent run, const Visit& visit, const ViewOf& view_of,
                                const Body& body) {
  if (!group.parameters_below.carrier || visit.parameters == Access::kNone) return body(view_of(run));
  const LeaseUse use = visit.parameters == Access::kWrite ? LeaseUse::kChange : LeaseUse::kRead;
  for_each_parameter_piece(group, run, direction_of(visit), [&](const ParameterPiece& piece) {
    StateView view = view_of(piece.run);
    Lease lease;
    if (piece.record != ParameterPiece::kNoRecord) {
      lease = mapped_->acquire(piece.record, use);
      point_at_parameters(view, group, lease.bytes().data() + piece.offset);
    }
    body(view);
  });
}

/// Visits the pieces of this rank's optimizer part whose masters and states are in the device's memory.
template <class Body>
void DeviceUpdate::visit_memory(const FlatGroup& group, const Visit& visit, const Body& body) {
  const auto view_of = [&](Extent run) { return states_in_memory(group, run); };
  visit_pieces(group, run_in_memory(group), visit, view_of, body);
}

/// Visits the pieces in records, one record after the other, while the device can reach the record.
template <class Body>
void DeviceUpdate::visit_records(const FlatGroup& group, const Visit& visit, const Body& body) {
  if (!states_) return;
  const RecordLayout& records = group.records;
  for (std::int64_t i = 0; i < records.records(); ++i) {
    const std::int64_t nth = visit.backward ? records.records() - 1 - i : i;
    const std::int64_t chunk = records.first_record() + nth;
    const LeaseUse use = visit.states == Access::kWrite ? LeaseUse::kChange : LeaseUse::kRead;
    Lease lease = states_->acquire(group.states_below.first_record + nth, use);
    const auto view_of = [&](Extent run) { return states_in_record(group, chunk, run, lease.bytes().data()); };
    visit_pieces(group, run_of_chunk(group, chunk), visit, view_of, body);
    lease.give_back();
  }
}

/// Goes over all of this rank's masters in a group. `visit` says where the masters lie.
void DeviceUpdate::visit_masters(const FlatGroup& group, const Visit& visit,
                                 c10::function_ref<void(const StateView&)> body) {
  if (visit.states != Access::kNone) {
    visit_memory(group, visit, body);
    visit_records(group, visit, body);
    return;
  }
  const auto view_of = [&](Extent run) { return states_in_memory(group, run); };
  visit_pieces(group, group.optimizer_part, visit, view_of, body);
}

void DeviceUpdate::make(const Visit& visit) {
  const std::size_t index = index_of(visit);
  switch (visit.work) {
    case VisitWork::kMeasure:
    case VisitWork::kLayerUpdates:
    case VisitWork::kDirections:
      return prepare(visit);
    case VisitWork::kReadMasters:
      return;  // `exchange` makes this pass
    case VisitWork::kUpdate:
      return pass_over(
          visit, [&](const StateView& view) { launch_update(index, view); },
          [&] {
            if (decided_) host_->update(index, decided_->rates);
          });
    case VisitWork::kSwapAverages:
      return pass_over(
          visit, [&](const StateView& view) { context_.kernels.swap_averages(run_of(groups_[index], view), tables_); },
          [&] { host_->swap_averages(index); });
  }
}

/// Does a group's part of the first pass, for rules that go over state twice.
void DeviceUpdate::prepare(const Visit& visit) {
  const Group& g = groups_[index_of(visit)];
  const FlatGroup& flat = *g.group;
  const bool copies_weights = layers_ && weights_below(g);
  const auto body = [&](const StateView& view) {
    if (visit.work == VisitWork::kDirections) {
      const MuonMomentumConstants momentum = matrices_->rule().muon_of(FlatParameter::kNoGroup).momentum_constants();
      context_.kernels.muon_directions(directions_of(g, view), momentum, tables_);
    }
    if (visit.work == VisitWork::kLayerUpdates) context_.kernels.update(directions_of(g, view), tables_);
    if (copies_weights)
      context_.kernels.read_weights(run_of(g, view), layers_->copy() + (view.run.offset - flat.optimizer_part.offset));
  };
  visit_memory(flat, visit, body);
  visit_records(flat, visit, body);
  if (copies_weights) layers_->add_copied(index_of(visit));
}

/// Calls `launch(view)` for each piece of a group that the device updates, while the device can reach the piece. Calls
/// `on_host()` if the host updates the other pieces.
template <class Launch, class OnHost>
void DeviceUpdate::pass_over(const Visit& visit, const Launch& launch, const OnHost& on_host) {
  const FlatGroup& flat = *groups_[index_of(visit)].group;
  const bool memory_first = !visit.backward || host_;  // so the device and the host compute at the same time
  if (memory_first) visit_memory(flat, visit, launch);
  if (host_) on_host();
  visit_records(flat, visit, launch);
  if (!memory_first) visit_memory(flat, visit, launch);
}

void DeviceUpdate::launch_update(std::size_t index, const StateView& view) {
  const Group& g = groups_[index];
  if (own_ && decided_) own_->update(index, *g.group, run_of(g, view), view, decided_->rates, tables_);
  if (own_) return;
  const bool is_assigned = g.is_of_matrices() && !is_muon();
  is_assigned ? context_.kernels.assign_weights(run_of(g, view), tables_)
              : context_.kernels.update(run_of(g, view), tables_);
}

/// If the rule is muon, the host does not know which matrices are used. The gradients of unused matrices are zeros.
void DeviceUpdate::exchange(std::span<const Visit> visits) {
  std::optional<MatrixUpdate::OfStep> step;
  if (decided_) step.emplace(MatrixUpdate::OfStep{context_.rates, decided_->rates, steps_, decided_->used});
  matrices_->exchange(unit_under_way(), step ? &*step : nullptr,
                      [&](const FlatGroup& group, auto body) { visit_masters(group, visits.front(), body); });
}

void DeviceUpdate::resume(std::span<const std::int64_t> steps) {
  if (host_) host_->resume(steps);
  if (own_) own_->resume(steps);
  if (!steps_.empty()) steps_.assign(steps.begin(), steps.end());
}

}  // namespace tessera
