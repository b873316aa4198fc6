#include "engine/step/device_update.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "engine/memory/host_view.h"
#include "optim/master_assigner.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "tessera/span.h"

namespace tessera {
namespace {

std::unique_ptr<StateStream> stream_of(const MemoryPlan& plan, const TrainingMemory& memory, DeviceKernels& kernels) {
  if (!memory.state_records || plan.steps_on_host()) return nullptr;
  const RecordPool& pool = plan.state_records();
  // Copies to the GPU pass in one order: units that come from the host must not wait for records which wait for slots.
  const std::int64_t ahead = plan.parameters_below() ? std::min<std::int64_t>(2, pool.device_slots) : pool.device_slots;
  const StateStream::Slots slots{memory.record_slots.data(), pool.record_bytes, pool.device_slots, ahead};
  return std::make_unique<StateStream>(memory.state_records, kernels, slots, pool.pinned_bytes == 0);
}

std::unique_ptr<MappedRecords> mapped_of(const MemoryPlan& plan, const TrainingMemory& memory, DeviceKernels& kernels) {
  if (!memory.parameter_records) return nullptr;
  return std::make_unique<MappedRecords>(memory.parameter_records, kernels, plan.parameter_records().held,
                                         !plan.parameters_on_host());
}

constexpr auto index_of_unit = [](const auto& group) { return group.group->unit->index; };

}  // namespace

DeviceUpdate::DeviceUpdate(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy,
                           const RuleOptimizer& rules, const MemoryPlan& plan, const MeshAxes& axes,
                           const TrainingMemory& memory, const LearningRates& rates, const OwnRules& own_rules,
                           DeviceKernels& kernels, ComputeDevice device, StepTables& tables, DeviceTables& table_memory)
    : plan_(plan),
      axes_(std::make_shared<MeshAxes>(axes)),
      strategy_(strategy),
      rules_(rules),
      kernels_(kernels),
      device_(device),
      tables_(tables),
      publisher_(plan, axes, nullptr, device.waits),
      rates_(rates),
      stream_(stream_of(plan, memory, kernels)),
      mapped_(mapped_of(plan, memory, kernels)),
      gradients_(memory.device_gradients) {
  if (!plan.matrices().batches().empty()) {
    matrices_ = std::make_unique<MatrixUpdate>(units, strategy, plan, axes, memory,
                                               make_tensor_rule(strategy.optimizer, own_rules, device.device, &kernels),
                                               device_, &kernels);
  }
  for_each_trainable(units, [&](FlatGroup& group) {
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
  if (strategy.optimizer.type == OptimizerType::kOwn) {
    own_ = std::make_unique<OwnDeviceUpdate>(parameters_, strategy, own_rules, rates, kernels, device.device);
  }
  fill_groups(tables, table_memory);
  fill_group_numbers(tables, table_memory);
  fill_matrices(tables, table_memory);
  if (adapts_layers(strategy.optimizer.type)) fill_layers(units);
  if (plan.steps_on_host()) {
    host_ = std::make_unique<HostUpdate>(units, strategy, memory, kernels, rates);
    if (!gradients_) direction_ = Direction::kBackward;  // in which gradients come
  }
  if (stream_ && !stream_->are_in_files()) report_speed(axes);
}

StepRequest DeviceUpdate::request() const {
  StepRequest request;
  request.rule = rules_.rule();
  request.numbers = rules_.numbers();
  request.trust_coefficient = strategy_.optimizer.trust_coefficient;
  if (is_muon()) request.of_matrices = matrices_->muon_of(FlatParameter::kNoGroup).step_numbers();
  return request;
}

/// For people who weigh a smaller fraction against its memory.
void DeviceUpdate::report_speed(const MeshAxes& axes) const {
  constexpr std::int64_t kMeasuredBytes = std::int64_t{64} << 20;
  const double bytes_per_second = stream_->measure(kMeasuredBytes);  // on all ranks, which may share the bus
  if (axes.world->rank() != 0) return;
  const std::int64_t streamed = plan_.streamed_bytes();
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
    run.arguments.clip_value = static_cast<float>(strategy_.gradient_clip_value);
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

/// Where parameters begin; and what is launched in one piece, but for parameters in records, of which nobody knows yet where they are.
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
    g.run.begins = memory.put<ParameterBegin>(begins);  // which those of its records get with it
    if (!g.group->parameters_below) g.run = run_of(g, states_in_memory(*g.group, run_in_memory(*g.group)));
  }
  tables.parameters = static_cast<int>(parameters_);
  tables.groups = static_cast<int>(groups_.size());
  tables.group = memory.put<StepGroup>(groups);
}

/// Of parameter groups (OptimizerConfig::groups), where there are some.
void DeviceUpdate::fill_group_numbers(StepTables& tables, DeviceTables& memory) const {
  const std::vector<ParameterGroup>& parameter_groups = strategy_.optimizer.groups;
  if (parameter_groups.empty()) return;
  std::vector<GroupNumbers> numbers;
  for (const ParameterGroup& group : parameter_groups) {
    const OptimizerConfig config = config_of(strategy_.optimizer, group);
    const bool is_elsewhere = own_ || config.type == OptimizerType::kAdafactor;
    const RuleOptimizer rules(is_elsewhere ? sgd_without_states(config) : config, strategy_.ema);
    GroupNumbers& added = numbers.emplace_back(GroupNumbers{rules.numbers(), group.lr_ratio});
    added.adapts_layers = group.layer_adaptation;
    if (is_muon()) added.of_matrices = matrices_->muon_of(numbers.size() - 1).step_numbers();
  }
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  std::vector<std::uint32_t> number;
  for (const Group& g : groups_) {
    for (const FlatParameter& parameter : g.group->parameters) {
      number.push_back(static_cast<std::uint32_t>(parameter.group + 1));
    }
  }
  tables.group_numbers = memory.put<GroupNumbers>(numbers);
  tables.group_number = memory.put<std::uint32_t>(number);
}

/// Of muon's first pass.
void DeviceUpdate::fill_matrices(StepTables& tables, DeviceTables& memory) {
  if (!is_muon()) return;
  std::vector<std::uint8_t> is_matrix;
  for (Group& g : groups_) {
    is_matrix.insert(is_matrix.end(), g.run.parameters, g.is_of_matrices() ? 1 : 0);
    if (!g.is_of_matrices()) continue;
    const OptimizerSlice slice = optimizer_slice(*g.group, states_in_memory(*g.group, run_in_memory(*g.group)));
    g.directions = g.run;
    g.directions.arguments =
        matrices_->muon_of(FlatParameter::kNoGroup).direction_arguments(slice, gradients_of(*g.group, slice));
    g.directions.arguments.clip_value = static_cast<float>(strategy_.gradient_clip_value);
  }
  tables.is_matrix = memory.put<std::uint8_t>(is_matrix);
}

/// Of lamb and lars.
void DeviceUpdate::fill_layers(const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<QueuedLayers::Part> parts;
  for (Group& g : groups_) {
    parts.push_back({g.group, g.run});
    if (!makes_lamb_directions()) continue;
    const OptimizerSlice slice = optimizer_slice(*g.group, states_in_memory(*g.group, run_in_memory(*g.group)));
    g.directions = g.run;
    g.directions.rule = StepRule::kLamb;
    g.directions.takes_direction = false;
    g.directions.direction = gradients_of(*g.group, slice).data();
    g.directions.arguments = rules_.arguments(slice);
    g.directions.arguments.clip_value = static_cast<float>(strategy_.gradient_clip_value);
    g.directions.arguments.average = {};
  }
  layers_ = std::make_unique<QueuedLayers>(units, parts, plan_.input().placement.optimizer, *axes_,
                                           makes_lamb_directions(), kernels_, device_);
}

void DeviceUpdate::swap_averages() {
  if (host_) {
    host_->fetch_parameters();
    host_->begin(std::vector<char>(parameters_));
  }
  pass_over_all([&](const DeviceRun& run) { kernels_.swap_averages(run, tables_); },
                [&](std::size_t group) { host_->swap_averages(group); });
}

/// Calls `launch(run)` for all runs, each of which the device reaches then, or `on_host(group)` for those of a group that the host
/// updates, and publishes what became of the groups. Those in files are gone through in the other direction each time, since the last ones
/// are in memory still.
template <class Launch, class OnHost>
void DeviceUpdate::pass_over_all(const Launch& launch, const OnHost& on_host) {
  const std::vector<std::size_t> order = groups_in_order();
  announce_records(order);
  for (const std::size_t group : order) pass_over_group(group, launch, on_host);
  finish();
  if (alternates()) direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

template <class Launch, class OnHost>
void DeviceUpdate::pass_over_group(std::size_t index, const Launch& launch, const OnHost& on_host) {
  const bool forward = direction_ == Direction::kForward;
  const Group& g = groups_[index];
  const RecordLayout& records = g.group->records;
  const auto launch_in_memory = [&] {
    const bool has_places = !g.group->parameters_below && !gradients_ && !strategy_.optimizer.in_backward;
    if (has_places) return launch(g.run);
    launch_pieces(g, run_in_memory(*g.group), launch, [&](Extent run) { return states_in_memory(*g.group, run); });
  };
  const bool comes_first = forward || host_;  // the device computes while the host does
  hold_gradients(g);
  if (comes_first) launch_in_memory();
  if (host_) on_host(index);
  for (std::int64_t c = records.first_record(); stream_ && c < records.chunks(); ++c) {
    const std::int64_t chunk = forward ? c : records.first_record() + records.chunks() - 1 - c;
    stream_->pass_through(g.group->first_record + chunk - records.first_record(), [&](std::byte* there) {
      launch_pieces(g, run_of_chunk(*g.group, chunk), launch,
                    [&](Extent run) { return states_in_record(*g.group, chunk, run, there); });
    });
  }
  if (!comes_first) launch_in_memory();
  publisher_.publish(*g.group);
}

/// Of groups of matrices, or of all others: as pass_over_all, of what lies in the device's memory.
template <class Launch>
void DeviceUpdate::pass_over_groups(bool of_matrices, const Launch& launch) {
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i].is_of_matrices() == of_matrices) pass_over_group(i, launch, [](std::size_t) {});
  }
}

void DeviceUpdate::finish() {
  publisher_.finish();
  if (stream_) stream_->end_pass();
  if (mapped_) mapped_->end_pass();
}

/// Of a pass over all of them.
std::vector<std::size_t> DeviceUpdate::groups_in_order() const {
  std::vector<std::size_t> order(groups_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (direction_ == Direction::kBackward) std::ranges::reverse(order);
  return order;
}

/// Those that train.
std::vector<std::size_t> DeviceUpdate::groups_of(std::span<const int> units) const {
  std::vector<std::size_t> order;
  for (const int unit : units) {
    const auto first = std::ranges::lower_bound(groups_, unit, {}, index_of_unit);
    for (auto group = first; group != groups_.end() && index_of_unit(*group) == unit; ++group)
      order.push_back(static_cast<std::size_t>(group - groups_.begin()));
  }
  return order;
}

/// Calls `launch` for the pieces of `run` whose parameters lie in one place. `view_of(piece)` has their masters and states.
template <class Launch, class ViewOf>
void DeviceUpdate::launch_pieces(const Group& group, Extent run, const Launch& launch, const ViewOf& view_of) {
  if (!group.group->parameters_below) return launch(run_of(group, view_of(run)));
  for_each_parameter_piece(*group.group, run, direction_, [&](const ParameterPiece& piece) {
    StateView view = view_of(piece.run);
    if (piece.record != ParameterPiece::kNoRecord)
      point_at_parameters(view, *group.group, mapped_->use(piece.record) + piece.offset);
    launch(run_of(group, view));
  });
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
  for (const std::size_t i : groups_in_order()) {
    const Group& group = groups_[i];
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

void DeviceUpdate::announce_records(std::span<const std::size_t> order) {
  const auto records_of = [&](StateKind kind) -> std::span<const std::int64_t> {
    order_.clear();
    for (const std::size_t i : order) {
      const FlatGroup& group = *groups_[i].group;
      append_records(group, kind, group.optimizer_part, direction_, order_);
    }
    return order_;
  };
  if (stream_) stream_->begin_pass(records_of(StateKind::kMastersAndStates));
  if (mapped_) mapped_->begin_pass(records_of(StateKind::kParameters));
}

void DeviceUpdate::expect(std::span<const int> order) {
  announce_records(strategy_.optimizer.in_backward ? groups_of(order) : groups_in_order());
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
  for (const std::size_t group : groups_of({&index, 1})) {
    pass_over_group(
        group, [&](const DeviceRun& run) { kernels_.update(run, tables_); }, [](std::size_t) {});
  }
}

UnitRequest DeviceUpdate::request_for(const Unit& unit) const {
  const int index = unit.index;
  const std::vector<std::size_t> groups = groups_of({&index, 1});
  UnitRequest request;
  request.unit = index;
  request.first_group = static_cast<std::uint32_t>(groups.front());
  request.groups = static_cast<std::uint32_t>(groups.size());
  const Group &first = groups_[groups.front()], &last = groups_[groups.back()];
  request.first_parameter = first.first_parameter;
  request.parameters = last.first_parameter + last.run.parameters - first.first_parameter;
  return request;
}

void DeviceUpdate::update() {
  if (matrices_) return is_muon() ? update_by_muon() : update_matrices_by_rule();
  if (own_) return update_by_own_rule();
  if (layers_) adapt_layers();
  const std::optional<UpdateRates> rates = begin_on_host();
  begin_gradients();
  pass_over_all([&](const DeviceRun& run) { kernels_.update(run, tables_); },
                [&](std::size_t group) {
                  if (rates) host_->update(group, *rates);
                });
  let_gradients_go();
  updates_ = false;
}

/// Before all are updated.
void DeviceUpdate::adapt_layers() {
  for (const Group& g : groups_) {
    if (makes_lamb_directions()) kernels_.update(g.directions, tables_);
  }
  layers_->agree(request(), tables_);
}

/// Elements, then matrices, of which those without gradients are zeros.
void DeviceUpdate::update_by_muon() {
  const auto update = [&](const DeviceRun& run) { kernels_.update(run, tables_); };
  pass_over_groups(false, update);
  const MuonMomentumConstants momentum = matrices_->muon_of(FlatParameter::kNoGroup).momentum_constants();
  for (const Group& g : groups_) {
    if (g.is_of_matrices()) kernels_.muon_directions(g.directions, momentum, tables_);
  }
  matrices_->exchange([](std::size_t) { return MatrixUpdate::Numbers{}; });
  pass_over_groups(true, update);
  finish();
}

/// Elements come first: while the device updates them, the host queues what becomes of the matrices. Skipped steps, too, meet the other
/// ranks where values are made known.
void DeviceUpdate::update_matrices_by_rule() {
  const std::optional<Decided> decided = wait_for_decision();
  pass_over_groups(false, [&](const DeviceRun& run) { kernels_.update(run, tables_); });
  if (decided) {
    for (std::size_t p = 0; p < parameters_; ++p) steps_[p] += decided->used[p] != 0;
    matrices_->exchange([&](std::size_t matrix) -> MatrixUpdate::Numbers {
      const auto [parameter, group] = dealt_[matrix];
      return MatrixUpdate::numbers_of(rates_, decided->rates, group, steps_[parameter], decided->used[parameter] != 0);
    });
  }
  pass_over_groups(true, [&](const DeviceRun& run) {
    if (decided) kernels_.assign_weights(run, tables_);
  });
  finish();
}

/// Waits for the device, and returns what it decided, unless that is to skip the step.
std::optional<DeviceUpdate::Decided> DeviceUpdate::wait_for_decision() const {
  const Span span("wait for the device's decision");
  DeviceDecision decision{};
  fetch_state(&decision, tables_.decision, sizeof decision, device_.device);
  throw_if_error(axes_->status());
  if (decision.is_skipped) return std::nullopt;
  Decided decided{{decision.gradient_scale, static_cast<float>(strategy_.gradient_clip_value), decision.lr},
                  std::vector<char>(parameters_)};
  fetch_state(decided.used.data(), tables_.used, static_cast<std::int64_t>(parameters_), device_.device);
  return decided;
}

/// Where the host updates.
std::optional<UpdateRates> DeviceUpdate::begin_on_host() {
  if (!host_) return std::nullopt;
  host_->fetch_parameters();
  const std::optional<Decided> decided = wait_for_decision();
  if (!decided) return std::nullopt;
  host_->begin(decided->used);
  return decided->rates;
}

/// Skipped steps, too, meet the other ranks where values are made known.
void DeviceUpdate::update_by_own_rule() {
  const std::optional<Decided> decided = wait_for_decision();
  const auto update = [&](const DeviceRun& run) {
    if (!decided) return;
    const Group& g = groups_[run.group];
    own_->update(*g.group, g.first_parameter, decided->used, run, states_in_memory(*g.group, run_in_memory(*g.group)),
                 decided->rates, tables_);
  };
  pass_over_all(update, [](std::size_t) {});
}

void DeviceUpdate::resume(std::span<const std::int64_t> steps) {
  if (host_) host_->resume(steps);
  if (own_) own_->resume(steps);
  if (!steps_.empty()) steps_.assign(steps.begin(), steps.end());
}

}  // namespace tessera
