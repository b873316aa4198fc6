#include "engine/step/queued/device_update.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "optim/master_assigner.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "sharding/host_view.h"
#include "tessera/span.h"

namespace tessera {
namespace {

std::unique_ptr<StateStream> stream_of(const QueuedContext& context) {
  const TrainingMemory& memory = context.memory;
  if (!memory.state_records || context.plan.steps_on_host()) return nullptr;
  const RecordPool& pool = context.plan.state_records();
  return make_state_stream(context.plan, memory.state_records, pool, memory.record_slots.data(), pool.device_slots,
                           context.kernels);
}

std::unique_ptr<MappedRecords> mapped_of(const QueuedContext& context) {
  if (!context.memory.parameter_records) return nullptr;
  return std::make_unique<MappedRecords>(context.memory.parameter_records, context.kernels,
                                         context.plan.parameter_records().held, !context.plan.parameters_on_host());
}

/// Kernels see SGD where the rule is computed elsewhere.
RuleNumbers numbers_of(const OptimizerConfig& config, bool is_own) {
  return rule_numbers(is_own || config.type == OptimizerType::kAdafactor ? sgd_without_states(config) : config);
}

constexpr auto index_of_unit = [](const auto& group) { return group.group->unit->index; };

}  // namespace

DeviceUpdate::DeviceUpdate(const QueuedContext& context, const RuleOptimizer& rules, StepTables& tables,
                           DeviceTables& table_memory)
    : context_(context),
      rules_(rules),
      tables_(tables),
      publisher_(context.plan, context.axes, /*behind=*/nullptr, context.device.waits),
      stream_(stream_of(context)),
      mapped_(mapped_of(context)),
      gradients_(context.memory.device_gradients) {
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  if (!context.plan.matrices().batches().empty()) {
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
    for (std::size_t i = 0; !group.matrices.empty() && i < group.parameters.size(); ++i) {
      dealt_.push_back({parameters_ + i, group.parameters[i].group});
    }
    parameters_ += group.parameters.size();
  });
  if (matrices_ && !is_muon()) steps_.resize(parameters_);
  if (optimizer.type == OptimizerType::kOwn)
    own_ = std::make_unique<OwnDeviceUpdate>(context, groups_.size(), parameters_);
  fill_groups(tables, table_memory);
  fill_group_of_parameters(tables, table_memory);
  fill_matrices(tables, table_memory);
  if (adapts_layers(optimizer.type)) make_layers();
  if (context.plan.steps_on_host()) {
    host_ = std::make_unique<HostUpdate>(context);
    if (!gradients_) direction_ = Direction::kBackward;  // in which gradients come
  }
  if (stream_ && !stream_->are_in_files()) report_speed();
}

StepRequest DeviceUpdate::request() const {
  StepRequest request;
  request.rule = rules_.rule();
  request.numbers = numbers_of(configs_[0], own_ != nullptr);
  request.trust_coefficient = context_.strategy.optimizer.trust_coefficient;
  if (is_muon()) request.of_matrices = matrices_->muon_of(FlatParameter::kNoGroup).step_numbers();
  return request;
}

/// For people who weigh a smaller fraction against its memory.
void DeviceUpdate::report_speed() const {
  constexpr std::int64_t kMeasuredBytes = std::int64_t{64} << 20;
  const double bytes_per_second = stream_->measure(kMeasuredBytes);  // on all ranks, which may share the bus
  if (context_.axes.world->rank() != 0) return;
  const std::int64_t streamed = context_.plan.streamed_bytes();
  log_info("masters and moments in host memory are streamed at " +
           format_bytes(static_cast<std::int64_t>(bytes_per_second)) + "/s each way, measured now: a step takes " +
           std::to_string(static_cast<double>(streamed) / bytes_per_second) + " s for " + format_bytes(streamed));
}

/// As the group's own, but over the view's elements.
DeviceRun DeviceUpdate::run_of(const Group& group, const StateView& view) const {
  const OptimizerSlice slice = optimizer_slice(*group.group, view);
  DeviceRun run = group.run;
  if (group.is_of_matrices()) {
    run.rule = StepRule::kSgd;
    run.takes_direction = true;
    run.arguments = matrices_->step_arguments(slice);
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

/// The view's momenta, or of lamb moments and weights; what is written takes the place of the gradients.
DeviceRun DeviceUpdate::directions_of(const Group& group, const StateView& view) const {
  const OptimizerSlice slice = optimizer_slice(*group.group, view);
  const std::span<float> place = gradients_of(*group.group, slice);
  DeviceRun run = group.run;
  if (is_muon()) {
    run.arguments = matrices_->muon_of(FlatParameter::kNoGroup).direction_arguments(slice, place);
  } else {
    run.rule = StepRule::kLamb;
    run.direction = place.data();
    run.arguments = rules_.arguments(slice);
    run.arguments.average = {};
  }
  run.arguments.clip_value = static_cast<float>(context_.strategy.gradient_clip_value);
  run.stream = slice.stream;
  run.first_element = slice.first_element;
  return run;
}

/// Where parameters begin.
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
    if (is_muon()) added.of_matrices = matrices_->muon_of(numbers.size() - 1).step_numbers();
  }
  return numbers;
}

/// OptimizerConfig::groups, where there are some.
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

/// Of muon.
void DeviceUpdate::fill_matrices(StepTables& tables, DeviceTables& memory) const {
  if (!is_muon()) return;
  std::vector<std::uint8_t> is_matrix;
  for (const Group& g : groups_) is_matrix.insert(is_matrix.end(), g.run.parameters, g.is_of_matrices() ? 1 : 0);
  tables.is_matrix = memory.put<std::uint8_t>(is_matrix);
}

/// Some of its weights, which then are copied where their norms are wanted.
bool DeviceUpdate::weights_below(const Group& group) const {
  const FlatGroup& flat = *group.group;
  return context_.plan.weights_below(
      context_.plan.input().units[static_cast<std::size_t>(flat.unit->index)].groups[flat.index]);
}

/// Of lamb and lars.
void DeviceUpdate::make_layers() {
  // Its slices have weights alone.
  const RuleOptimizer bare(sgd_without_states(context_.strategy.optimizer), EmaConfig());
  std::vector<QueuedLayers::Part> parts;
  for (const Group& g : groups_) {
    OptimizerSlice slice = optimizer_slice(*g.group, states_in_memory(*g.group, g.group->optimizer_part));
    slice.states = {};
    DeviceRun run;
    run.arguments.gradient = gradients_of(*g.group, slice).data();
    const bool is_copied = weights_below(g);
    if (!is_copied) run.arguments = bare.arguments(slice);
    parts.push_back({g.group, run, is_copied});
  }
  layers_ = std::make_unique<QueuedLayers>(context_, parts, makes_lamb_directions());
}

void DeviceUpdate::swap_averages() {
  if (host_) {
    host_->fetch_parameters();
    host_->begin(std::vector<char>(parameters_));
  }
  pass_over_all([&](std::size_t group,
                    const StateView& view) { context_.kernels.swap_averages(run_of(groups_[group], view), tables_); },
                [&](std::size_t group) { host_->swap_averages(group); });
}

/// In the direction of the pass.
std::vector<DeviceUpdate::Turn> DeviceUpdate::turns(Which which, bool prepares) const {
  std::vector<Turn> order;
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const bool is_wanted = which == Which::kAll || groups_[i].is_of_matrices() == (which == Which::kMatrices);
    if (is_wanted) order.push_back({i, prepares});
  }
  if (direction_ == Direction::kBackward) std::ranges::reverse(order);
  return order;
}

/// Of those that train.
std::vector<DeviceUpdate::Turn> DeviceUpdate::turns_of(std::span<const int> units) const {
  std::vector<Turn> order;
  for (const int unit : units) {
    const auto first = std::ranges::lower_bound(groups_, unit, {}, index_of_unit);
    for (auto group = first; group != groups_.end() && index_of_unit(*group) == unit; ++group)
      order.push_back({static_cast<std::size_t>(group - groups_.begin())});
  }
  return order;
}

/// Of a step.
std::vector<DeviceUpdate::Turn> DeviceUpdate::first_pass() const {
  if (!matrices_) return turns(Which::kAll, /*prepares=*/layers_ != nullptr);
  std::vector<Turn> order = elements_come_last_ ? std::vector<Turn>() : turns(Which::kElements);
  std::ranges::copy(turns(Which::kMatrices, /*prepares=*/true), std::back_inserter(order));
  return order;
}

/// Announces the records that a pass goes through.
void DeviceUpdate::begin_records(std::span<const Turn> turns) {
  const MemoryPlan::FirstPass first = context_.plan.first_pass_of_matrices();
  const auto records_of = [&](StateKind kind) -> std::span<const std::int64_t> {
    const bool is_in_first = kind == StateKind::kParameters ? first.parameters : first.states;
    order_.clear();
    for (const auto& [group, prepares] : turns) {
      const FlatGroup& flat = *groups_[group].group;
      if (prepares && matrices_ && !is_in_first) continue;
      append_records(flat, kind, flat.optimizer_part, direction_, order_);
    }
    return order_;
  };
  if (stream_) stream_->begin_pass(records_of(StateKind::kMastersAndStates));
  if (mapped_) mapped_->begin_pass(records_of(StateKind::kParameters));
}

void DeviceUpdate::end_records() {
  if (stream_) stream_->end_pass();
  if (mapped_) mapped_->end_pass();
}

/// Calls `visit` for the pieces of `run` whose parameters lie in one place, or for all of it where nobody asks for those. `view_of(piece)`
/// has their masters and states. `use`: what `visit` does with them.
template <class ViewOf, class Visit>
void DeviceUpdate::visit_pieces(const FlatGroup& group, Extent run, bool with_parameters, StateUse use,
                                const ViewOf& view_of, const Visit& visit) {
  if (!group.parameters_below || !with_parameters) return visit(view_of(run));
  for_each_parameter_piece(group, run, direction_, [&](const ParameterPiece& piece) {
    StateView view = view_of(piece.run);
    if (piece.record != ParameterPiece::kNoRecord)
      point_at_parameters(view, group, mapped_->use(piece.record, use == StateUse::kUpdate) + piece.offset);
    visit(view);
  });
}

/// What of this rank's optimizer part has its masters and states in the device's memory.
template <class Visit>
void DeviceUpdate::visit_memory(const FlatGroup& group, bool with_parameters, StateUse use, const Visit& visit) {
  const auto view_of = [&](Extent run) { return states_in_memory(group, run); };
  visit_pieces(group, run_in_memory(group), with_parameters, use, view_of, visit);
}

/// The rest, record by record, each of which the device reaches then.
template <class Visit>
void DeviceUpdate::visit_records(const FlatGroup& group, bool with_parameters, StateUse use, const Visit& visit) {
  if (!stream_) return;
  const RecordLayout& records = group.records;
  for (std::int64_t i = 0; i < records.records(); ++i) {
    const std::int64_t nth = direction_ == Direction::kForward ? i : records.records() - 1 - i;
    const std::int64_t chunk = records.first_record() + nth;
    stream_->pass_through(group.first_record + nth, use != StateUse::kRead, [&](std::byte* there) {
      const auto view_of = [&](Extent run) { return states_in_record(group, chunk, run, there); };
      visit_pieces(group, run_of_chunk(group, chunk), with_parameters, use, view_of, visit);
    });
  }
}

/// All of this rank's, as the first pass does.
void DeviceUpdate::visit_masters(const FlatGroup& group, c10::function_ref<void(const StateView&)> visit) {
  const auto [in_parameters, in_records] = context_.plan.first_pass_of_matrices();
  if (in_records) {
    visit_memory(group, in_parameters, StateUse::kRead, visit);
    visit_records(group, in_parameters, StateUse::kRead, visit);
    return;
  }
  const auto view_of = [&](Extent run) { return states_in_memory(group, run); };
  visit_pieces(group, group.optimizer_part, in_parameters, StateUse::kRead, view_of, visit);
}

/// A group's part in the first pass of those that go over state twice, which goes forward.
void DeviceUpdate::prepare(std::size_t index) {
  const Group& g = groups_[index];
  const FlatGroup& flat = *g.group;
  const bool copies_weights = layers_ && weights_below(g);
  const auto visit = [&](const StateView& view) {
    if (is_muon()) {
      const MuonMomentumConstants momentum = matrices_->muon_of(FlatParameter::kNoGroup).momentum_constants();
      context_.kernels.muon_directions(directions_of(g, view), momentum, tables_);
    }
    if (makes_lamb_directions()) context_.kernels.update(directions_of(g, view), tables_);
    if (copies_weights)
      context_.kernels.read_weights(run_of(g, view), layers_->copy() + (view.run.offset - flat.optimizer_part.offset));
  };
  const StateUse use = is_muon() || makes_lamb_directions() ? StateUse::kUpdateStates : StateUse::kRead;
  visit_memory(flat, /*with_parameters=*/!is_muon(), use, visit);
  visit_records(flat, /*with_parameters=*/!is_muon(), use, visit);
  if (copies_weights) layers_->add_copied(index);
}

/// Calls `launch(group, view)` for all that the device updates, each of which it reaches then, or `on_host(group)` for those of a group that
/// the host updates, and publishes what became of the groups. Those in files are gone through in the other direction each time, since the
/// last ones are in memory still.
template <class Launch, class OnHost>
void DeviceUpdate::pass_over_all(const Launch& launch, const OnHost& on_host) {
  const std::vector<Turn> order = turns(Which::kAll);
  begin_records(order);
  for (const Turn& turn : order) pass_over_group(turn.group, launch, on_host);
  finish();
  if (alternates()) direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

template <class Launch, class OnHost>
void DeviceUpdate::pass_over_group(std::size_t index, const Launch& launch, const OnHost& on_host) {
  const Group& g = groups_[index];
  const auto visit = [&](const StateView& view) { launch(index, view); };
  const bool memory_first = direction_ == Direction::kForward || host_;  // the device computes while the host does
  hold_gradients(g);
  if (memory_first) visit_memory(*g.group, /*with_parameters=*/true, StateUse::kUpdate, visit);
  if (host_) on_host(index);
  visit_records(*g.group, /*with_parameters=*/true, StateUse::kUpdate, visit);
  if (!memory_first) visit_memory(*g.group, /*with_parameters=*/true, StateUse::kUpdate, visit);
  publisher_.publish(*g.group);
}

template <class Launch>
void DeviceUpdate::pass_over(std::span<const Turn> turns, const Launch& launch) {
  for (const Turn& turn : turns) pass_over_group(turn.group, launch, [](std::size_t) {});
}

void DeviceUpdate::finish() {
  publisher_.finish();
  end_records();
}

/// Of what the device updates.
bool DeviceUpdate::needs_gradients(const Group& group) const {
  return !host_ || group.group->records.before_records() > 0;
}

/// So that they are brought ahead. Groups of one unit follow each other.
void DeviceUpdate::begin_gradients() {
  if (!gradients_) return;
  updates_ = true;
  std::vector<int> order;
  for (const Turn& turn : turns(Which::kAll)) {
    const Group& group = groups_[turn.group];
    const int unit = index_of_unit(group);
    if (needs_gradients(group) && (order.empty() || order.back() != unit)) order.push_back(unit);
  }
  gradients_->begin_update(std::move(order));
}

/// Averages are exchanged without.
void DeviceUpdate::hold_gradients(const Group& group) {
  Unit* const unit = group.group->unit;
  if (!updates_ || held_ == unit || !needs_gradients(group)) return;
  let_gradients_go();
  gradients_->open(*unit, /*has_sum=*/true);
  held_ = unit;
}

void DeviceUpdate::let_gradients_go() {
  if (Unit* const unit = std::exchange(held_, nullptr)) gradients_->close(*unit, /*changed=*/false);
}

/// The host takes groups as their gradients come, and what backward left of those in files is of the first units.
bool DeviceUpdate::alternates() const {
  const bool reads_states = stream_ && stream_->are_in_files(), reads_parameters = mapped_ && mapped_->are_in_files();
  return !host_ && !gradients_ && (reads_states || reads_parameters);
}

void DeviceUpdate::expect(std::span<const int> order) {
  if (matrices_) matrices_->expect();
  if (context_.plan.passes_twice()) direction_ = Direction::kForward;
  begin_records(context_.strategy.optimizer.in_backward ? turns_of(order) : first_pass());
  if (host_) host_->expect(/*sums_of_step=*/true);
}

void DeviceUpdate::fetch(const Unit& unit) {
  if (host_) host_->fetch(unit);
}

void DeviceUpdate::forget() {
  if (host_) host_->expect(/*sums_of_step=*/false);
}

void DeviceUpdate::update_unit(const Unit& unit) {
  const int index = unit.index;
  const std::vector<Turn> order = turns_of({&index, 1});
  if (!own_) return pass_over(order, [&](std::size_t g, const StateView& view) { launch_update(g, view); });
  const std::optional<Decided> decided = wait_for_decision();
  if (decided) begin_own(order, *decided);
  pass_over(order, [&](std::size_t g, const StateView& view) { launch_own(g, view, decided); });
}

UnitRequest DeviceUpdate::request_for(const Unit& unit) const {
  const int index = unit.index;
  const std::vector<Turn> turns = turns_of({&index, 1});
  UnitRequest request;
  request.unit = index;
  request.first_group = static_cast<std::uint32_t>(turns.front().group);
  request.groups = static_cast<std::uint32_t>(turns.size());
  const Group &first = groups_[turns.front().group], &last = groups_[turns.back().group];
  request.first_parameter = first.first_parameter;
  request.parameters = last.first_parameter + last.run.parameters - first.first_parameter;
  return request;
}

void DeviceUpdate::launch_update(std::size_t group, const StateView& view) {
  context_.kernels.update(run_of(groups_[group], view), tables_);
}

void DeviceUpdate::update() {
  if (matrices_) return update_with_matrices();
  if (layers_) adapt_layers();
  const std::optional<Decided> decided = decision_for_host();
  begin_gradients();
  pass_over_all([&](std::size_t group,
                    const StateView& view) { own_ ? launch_own(group, view, decided) : launch_update(group, view); },
                [&](std::size_t group) {
                  if (decided) host_->update(group, decided->rates);
                });
  let_gradients_go();
  updates_ = false;
}

/// Before all are updated.
void DeviceUpdate::adapt_layers() {
  direction_ = Direction::kForward;
  const std::vector<Turn> order = first_pass();
  begin_records(order);
  for (const Turn& turn : order) prepare(turn.group);
  end_records();
  layers_->agree(request(), tables_);
  if (alternates()) direction_ = Direction::kBackward;
}

/// As Update::update_with_matrices. Under muon matrices without gradients are zeros. A rule is not called in a step that is skipped, of
/// which all ranks learn here: nothing of it takes place.
void DeviceUpdate::update_with_matrices() {
  std::optional<Decided> decided;
  if (!is_muon()) {
    decided = wait_for_decision();
    if (!decided) return;
    for (std::size_t p = 0; p < parameters_; ++p) steps_[p] += decided->used[p] != 0;
  }
  const auto update = [&](std::size_t group, const StateView& view) {
    if (groups_[group].is_of_matrices() && !is_muon())
      return context_.kernels.assign_weights(run_of(groups_[group], view), tables_);
    launch_update(group, view);
  };
  const auto numbers_of = [&](std::size_t matrix) -> MatrixUpdate::Numbers {
    if (is_muon()) return {};
    const auto [parameter, group] = dealt_[matrix];
    return MatrixUpdate::numbers_of(context_.rates, decided->rates, group, steps_[parameter],
                                    decided->used[parameter] != 0);
  };
  const auto exchange = [&] {
    matrices_->exchange(numbers_of, [&](const FlatGroup& group, auto visit) { visit_masters(group, visit); });
  };
  direction_ = Direction::kForward;
  const std::vector<Turn> first = first_pass();
  begin_records(first);
  for (const Turn& turn : first) {
    if (!turn.prepares) pass_over_group(turn.group, update, [](std::size_t) {});
    if (turn.prepares && is_muon()) prepare(turn.group);
  }
  if (!is_muon()) exchange();  // which reads masters
  end_records();
  if (alternates()) direction_ = Direction::kBackward;
  std::vector<Turn> second = turns(Which::kMatrices);
  if (elements_come_last_) std::ranges::copy(turns(Which::kElements), std::back_inserter(second));
  // All of it is queued, while the host may have to wait for records before others begin.
  if (is_muon()) exchange();
  begin_records(second);
  pass_over(second, update);
  finish();
  direction_ = Direction::kForward;
  elements_come_last_ = alternates() && !elements_come_last_;
}

/// Waits for the device, and returns what it decided, unless that is to skip the step.
std::optional<DeviceUpdate::Decided> DeviceUpdate::wait_for_decision() const {
  const Span span("wait for the device's decision");
  DeviceDecision decision{};
  fetch_state(&decision, tables_.decision, sizeof decision, context_.device.device);
  throw_if_error(context_.axes.status());
  if (decision.is_skipped) return std::nullopt;
  Decided decided{{decision.gradient_scale, static_cast<float>(context_.strategy.gradient_clip_value), decision.lr,
                   is_first_of_run(decision, tables_.updates_in_backward)},
                  std::vector<char>(parameters_)};
  fetch_state(decided.used.data(), tables_.used, static_cast<std::int64_t>(parameters_), context_.device.device);
  return decided;
}

/// Where the host makes updates, or queues those of a program's rule: it waits for the decision, and begins.
std::optional<DeviceUpdate::Decided> DeviceUpdate::decision_for_host() {
  if (!host_ && !own_) return std::nullopt;
  if (host_) host_->fetch_parameters();
  std::optional<Decided> decided = wait_for_decision();
  if (!decided) return decided;
  if (host_) host_->begin(decided->used);
  if (own_) begin_own(turns(Which::kAll), *decided);
  return decided;
}

void DeviceUpdate::begin_own(std::span<const Turn> turns, const Decided& decided) {
  for (const Turn& turn : turns) {
    const Group& g = groups_[turn.group];
    own_->begin(turn.group, *g.group, g.first_parameter, decided.used);
  }
}

/// Skipped steps, too, take records there and back, and meet the other ranks where values are made known.
void DeviceUpdate::launch_own(std::size_t group, const StateView& view, const std::optional<Decided>& decided) {
  if (decided) own_->update(group, *groups_[group].group, run_of(groups_[group], view), view, decided->rates, tables_);
}

void DeviceUpdate::resume(std::span<const std::int64_t> steps) {
  if (host_) host_->resume(steps);
  if (own_) own_->resume(steps);
  if (!steps_.empty()) steps_.assign(steps.begin(), steps.end());
}

}  // namespace tessera
