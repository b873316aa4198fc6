#include "engine/step/queued_step.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>

#include "engine/memory/host_view.h"
#include "engine/step/gather_order.h"
#include "engine/step/gradient_norm.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {
namespace {

const RuleOptimizer& rules_of(const Optimizer& optimizer) {
  const auto* const rules = dynamic_cast<const RuleOptimizer*>(&optimizer);
  TORCH_INTERNAL_ASSERT(rules, "an optimizer without kernels");
  return *rules;
}

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

std::int64_t bytes_of_counts(const std::vector<std::int64_t>& counts) {
  return static_cast<std::int64_t>(counts.size() * sizeof(std::int64_t));
}

}  // namespace

QueuedStep::QueuedStep(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& axes,
                       const Reducer& reducer, const Strategy& strategy, const Optimizer& optimizer,
                       const TrainingMemory& memory, Accelerator& accelerator)
    : plan_(plan),
      axes_(std::make_shared<MeshAxes>(axes)),
      reducer_(reducer),
      strategy_(strategy),
      rules_(rules_of(optimizer)),
      kernels_(*accelerator.kernels),
      exposed_(*accelerator.exposed),
      device_(accelerator.device),
      scales_loss_(strategy.mixed_precision.param == DType::kF16),
      publisher_(plan, axes, nullptr, accelerator.device.waits),
      rates_(strategy.optimizer),
      stream_(stream_of(plan, memory, kernels_)),
      mapped_(mapped_of(plan, memory, kernels_)),
      gradients_(memory.device_gradients),
      ranks_with_parts_(owners_of_parts(plan.input().placement.gradients, axes)),
      totals_(norm_totals(units, ranks_with_parts_.size())),
      memory_(device_.device) {
  const LossScaler scaler(strategy.mixed_precision.loss_scale);
  request_.rule = rules_.rule();
  request_.numbers = rules_.numbers();
  request_.microbatches = static_cast<double>(axes.world->size() * strategy.gradient_accumulation);
  request_.max_norm = strategy.gradient_clipping;
  if (scales_loss_) request_.loss_scale = scaler.rule();
  request_.base_batch_size = strategy.lr_schedule.base_batch_size;
  tables_.updates_in_backward = strategy.optimizer.in_backward;
  if (!plan.matrices().batches().empty()) {
    matrices_ = std::make_unique<MatrixUpdate>(units, strategy, plan, axes, memory, nullptr, device_);
    request_.of_matrices = matrices_->muon_of(FlatParameter::kNoGroup).step_numbers();
  }
  for_each_trainable(units, [&](FlatGroup& group) {
    DeviceRun run;
    run.rule = request_.rule;
    run.group = static_cast<std::uint32_t>(groups_.size());
    run.parameters = static_cast<std::uint32_t>(group.layout.size());
    Group& added = groups_.emplace_back(Group{&group, run});
    // Of parameters in records nobody knows yet where they are.
    if (!group.parameters_below) added.run = run_of(added, states_in_memory(group, run_in_memory(group)));
  });
  fill_matrices();
  if (updates_in_backward()) {
    auto names = std::make_shared<std::vector<std::string>>();
    for (const auto& unit : units) names->push_back(unit->name);
    unit_names_ = std::move(names);
  }
  plan_message();
  allocate(scales_loss_ ? scaler.state() : LossScalerState{});
  fill_tables();
  fill_group_numbers();
  std::vector<FlatGroup*> flat_groups;
  for (const Group& g : groups_) flat_groups.push_back(g.group);
  norm_.emplace(flat_groups, reinterpret_cast<double*>(message_ + sums_offset_), gradients_ || updates_in_backward(),
                kernels_, device_.device);
  if (plan.steps_on_host()) {
    host_ = std::make_unique<HostUpdate>(units, strategy, memory, kernels_, rates_);
    if (!gradients_) direction_ = Direction::kBackward;  // in which gradients come
  }
  if (stream_ && !stream_->are_in_files()) report_speed();
}

/// For people who weigh a smaller fraction against its memory.
void QueuedStep::report_speed() const {
  constexpr std::int64_t kMeasuredBytes = std::int64_t{64} << 20;
  const double bytes_per_second = stream_->measure(kMeasuredBytes);  // on all ranks, which may share the bus
  if (axes_->world->rank() != 0) return;
  const std::int64_t streamed = plan_.streamed_bytes();
  log_info("masters and moments in host memory are streamed at " +
           format_bytes(static_cast<std::int64_t>(bytes_per_second)) + "/s each way, measured now: a step takes " +
           std::to_string(static_cast<double>(streamed) / bytes_per_second) + " s for " + format_bytes(streamed));
}

/// As the group's own, but over the view's elements.
DeviceRun QueuedStep::run_of(const Group& group, const StateView& view) const {
  const OptimizerSlice slice = optimizer_slice(*group.group, view);
  DeviceRun run = group.run;
  if (group.is_of_matrices()) {
    run.rule = StepRule::kSgd;
    run.takes_direction = true;
    run.arguments = matrices_->muon_of(FlatParameter::kNoGroup).step_arguments(slice);
  } else {
    run.arguments = rules_.arguments(slice);
    run.arguments.clip_value = static_cast<float>(strategy_.gradient_clip_value);
  }
  run.stream = slice.stream;
  run.first_element = slice.first_element;
  return run;
}

/// Of muon's first pass.
void QueuedStep::fill_matrices() {
  if (!matrices_) return;
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
  tables_.is_matrix = memory_.put<std::uint8_t>(is_matrix);
}

void QueuedStep::plan_message() {
  for (const Group& g : groups_) parameters_ += g.group->parameters.size();
  sums_offset_ = (sizeof(StepMessageHeader) + parameters_ + 7) / 8 * 8;
  message_bytes_ = sums_offset_ + totals_.most_sums() * sizeof(double);
}

void QueuedStep::allocate(const LossScalerState& scaler) {
  message_ = memory_.take<std::byte>(message_bytes_);
  const auto ranks = static_cast<std::size_t>(axes_->world->size());
  messages_ = ranks == 1 ? message_ : memory_.take<std::byte>(ranks * message_bytes_);

  DeviceDecision first{};
  first.scaler = scaler;
  tables_.decision = memory_.put<DeviceDecision>({&first, 1});
  const auto options = at::TensorOptions().device(device_.device);
  loss_ = at::from_blob(message_ + offsetof(StepMessageHeader, loss), {1}, options.dtype(at::kDouble));
  loss_scale_ = at::from_blob(&tables_.decision->scaler.scale, {}, options.dtype(at::kFloat));
  for (InFlight& slot : ring_) {
    slot.message = kernels_.pinned_memory(sums_offset_);
    slot.decision = kernels_.pinned_memory(sizeof(DeviceDecision));
    slot.used = kernels_.pinned_memory(parameters_);
  }
}

void QueuedStep::fill_tables() {
  std::vector<StepGroup> groups;
  std::uint32_t parameter = 0;
  for (Group& g : groups_) {
    const Layout& layout = g.group->layout;
    groups.push_back({parameter, static_cast<std::uint32_t>(layout.size())});
    std::vector<ParameterBegin> begins;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      const auto offset = static_cast<std::uint64_t>(layout.extent(i).offset);
      begins.push_back({static_cast<std::uint32_t>(offset / kParameterAlign), parameter++});
    }
    g.run.begins = memory_.put<ParameterBegin>(begins);  // which those of its records get with it
    g.directions.begins = g.run.begins;
  }
  StepTables& t = tables_;
  t.ranks = axes_->world->size();
  t.shard_size = axes_->shard_size;
  t.parameters = static_cast<int>(parameters_);
  t.groups = static_cast<int>(groups_.size());
  t.tensors = static_cast<int>(totals_.tensors());
  t.message_bytes = message_bytes_;
  t.sums_offset = sums_offset_;
  t.group = memory_.put<StepGroup>(groups);
  t.part_ranks = memory_.put<std::int32_t>(ranks_with_parts_);
  t.links = memory_.put<NormLink>(totals_.links());
  t.first_link = memory_.put<std::uint32_t>(totals_.first_link());
  t.messages = messages_;
  t.link_scratch = memory_.take<double>(totals_.links().size());
  t.squares = memory_.take<double>(totals_.tensors());
  t.sum_of_squares = memory_.take<double>(1);
  t.used = memory_.take<std::uint8_t>(parameters_);
  t.is_uniform = memory_.take<std::uint8_t>(groups_.size());
  t.constants = memory_.take<RuleConstants>(parameters_);
  t.steps = memory_.take<std::int64_t>(parameters_);
}

/// Of parameter groups (OptimizerConfig::groups), where there are some.
void QueuedStep::fill_group_numbers() {
  const std::vector<ParameterGroup>& parameter_groups = strategy_.optimizer.groups;
  if (parameter_groups.empty()) return;
  std::vector<GroupNumbers> numbers;
  for (const ParameterGroup& group : parameter_groups) {
    const RuleOptimizer rules(config_of(strategy_.optimizer, group), strategy_.ema);
    GroupNumbers& added = numbers.emplace_back(GroupNumbers{rules.numbers(), {}, group.lr_ratio});
    if (matrices_) added.of_matrices = matrices_->muon_of(numbers.size() - 1).step_numbers();
  }
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  std::vector<std::uint32_t> number;
  for (const Group& g : groups_) {
    for (const FlatParameter& parameter : g.group->parameters) {
      number.push_back(static_cast<std::uint32_t>(parameter.group + 1));
    }
  }
  tables_.group_numbers = memory_.put<GroupNumbers>(numbers);
  tables_.group_number = memory_.put<std::uint32_t>(number);
  tables_.group_lr = group_lr_ = memory_.take<double>(numbers.size());
  for (InFlight& slot : ring_) slot.rates = kernels_.pinned_memory(numbers.size() * sizeof(double));
}

void QueuedStep::add_loss(const at::Tensor& loss, std::int64_t microbatches) {
  const Unrecorded unrecorded;
  loss_.add_(loss.detach().reshape({1}).to(at::kDouble).div(static_cast<double>(microbatches)));
}

double QueuedStep::lr(std::optional<std::size_t> group) const {
  const double everybodys = rates_.everybodys() * lr_ratio_at(strategy_.lr_schedule, applied());
  return rates_.of(everybodys, group.value_or(FlatParameter::kNoGroup));
}

void QueuedStep::swap_averages() {
  if (host_) {
    host_->fetch_parameters();
    host_->begin(std::vector<char>(parameters_));
  }
  pass_over_runs([&](const DeviceRun& run) { kernels_.swap_averages(run, tables_); },
                 [&](std::size_t group) { host_->swap_averages(group); });
}

/// Calls `launch(run)` for all runs, each of which the device reaches then, or `on_host(group)` for those of a group that the host
/// updates, and publishes what became of the groups. Those in files are gone through in the other direction each time, since the last ones
/// are in memory still.
template <class Launch, class OnHost>
void QueuedStep::pass_over_runs(const Launch& launch, const OnHost& on_host) {
  const std::vector<std::size_t> order = groups_in_order();
  announce_records(order);
  for (const std::size_t group : order) pass_over_group(group, launch, on_host);
  end_pass();
  if (alternates()) direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

template <class Launch, class OnHost>
void QueuedStep::pass_over_group(std::size_t index, const Launch& launch, const OnHost& on_host) {
  const bool forward = direction_ == Direction::kForward;
  const Group& g = groups_[index];
  const RecordLayout& records = g.group->records;
  const auto launch_in_memory = [&] {
    const bool has_places = !g.group->parameters_below && !gradients_ && !updates_in_backward();
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

void QueuedStep::end_pass() {
  publisher_.finish();
  if (stream_) stream_->end_pass();
  if (mapped_) mapped_->end_pass();
}

/// Of a pass over all of them.
std::vector<std::size_t> QueuedStep::groups_in_order() const {
  std::vector<std::size_t> order(groups_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  if (direction_ == Direction::kBackward) std::ranges::reverse(order);
  return order;
}

/// Those that train.
std::vector<std::size_t> QueuedStep::groups_of(std::span<const int> units) const {
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
void QueuedStep::launch_pieces(const Group& group, Extent run, const Launch& launch, const ViewOf& view_of) {
  if (!group.group->parameters_below) return launch(run_of(group, view_of(run)));
  for_each_parameter_piece(*group.group, run, direction_, [&](const ParameterPiece& piece) {
    StateView view = view_of(piece.run);
    if (piece.record != ParameterPiece::kNoRecord)
      point_at_parameters(view, *group.group, mapped_->use(piece.record) + piece.offset);
    launch(run_of(group, view));
  });
}

/// Of what the device updates.
bool QueuedStep::needs_gradients(const Group& group) const {
  return !host_ || group.group->records.before_records() > 0;
}

/// So that they are brought ahead. Groups of one unit follow each other.
void QueuedStep::begin_gradients() {
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
void QueuedStep::hold_gradients(const Group& group) {
  Unit* const unit = group.group->unit;
  if (!updates_ || held_ == unit || !needs_gradients(group)) return;
  let_gradients_go();
  gradients_->open(*unit, /*has_sum=*/true);
  held_ = unit;
}

void QueuedStep::let_gradients_go() {
  if (Unit* const unit = std::exchange(held_, nullptr)) gradients_->close(*unit, /*changed=*/false);
}

/// The host takes groups as their gradients come, and what backward left of those in files is of the first units.
bool QueuedStep::alternates() const {
  const bool reads_states = stream_ && stream_->are_in_files(), reads_parameters = mapped_ && mapped_->are_in_files();
  return !host_ && !gradients_ && (reads_states || reads_parameters);
}

void QueuedStep::announce_records(std::span<const std::size_t> order) {
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

void QueuedStep::expect_update(std::span<const int> order) {
  if (!updates_in_backward()) {
    announce_records(groups_in_order());
    sums_are_steps_ = true;
    if (host_) host_->expect(/*sums_of_step=*/true);
    return;
  }
  send_rates(take_slot());  // before records, whose copies wait for each other
  announce_records(groups_of(order));
}

void QueuedStep::reduced(const Unit& unit) {
  if (sums_are_steps_) norm_->add(unit);
  if (host_) host_->fetch(unit);
}

void QueuedStep::forget_losses() {
  sums_are_steps_ = false;
  if (host_) host_->expect(/*sums_of_step=*/false);
  const Unrecorded unrecorded;
  loss_.zero_();
}

LossSeed QueuedStep::seed_of(const at::Tensor& loss) const {
  const Unrecorded unrecorded;
  LossSeed result{at::ones_like(loss), {}};
  if (!scales_loss_) return result;
  if (loss.scalar_type() != at::kHalf) {
    result.seed.mul_(loss_scale_);
  } else {
    result.seed.mul_(loss_scale_.clamp_max(kMostFp16Seed));
    result.factor = loss_scale_.div(kMostFp16Seed).clamp_min(1.0);
  }
  return result;
}

void QueuedStep::update(Unit& unit, const UnitAgreement& agreed) {
  if (downloaded_ && !std::exchange(is_begun_, true)) join_downloads();  // of the step before
  norm_->add(unit);
  kernels_.begin_unit(request(), request_for(unit, agreed), tables_);
  const int index = unit.index;
  for (const std::size_t group : groups_of({&index, 1}))
    pass_over_group(
        group, [&](const DeviceRun& run) { kernels_.update(run, tables_); }, [](std::size_t) {});
}

UnitRequest QueuedStep::request_for(const Unit& unit, const UnitAgreement& agreed) const {
  const int index = unit.index;
  const std::vector<std::size_t> groups = groups_of({&index, 1});
  UnitRequest request;
  request.unit = index;
  request.first_group = static_cast<std::uint32_t>(groups.front());
  request.groups = static_cast<std::uint32_t>(groups.size());
  for (std::size_t i = 0; i <= groups.back(); ++i) {
    (i < groups.front() ? request.first_parameter : request.parameters) += groups_[i].run.parameters;
  }
  const std::span<const double> sums = norm_->sums_of(unit);
  request.sums = sums.data();
  request.sum_count = static_cast<std::uint32_t>(sums.size());
  request.used = agreed.used_there;
  request.differ = agreed.differ_there;
  request.digest_bits = static_cast<std::uint32_t>(agreed.digest_bits);
  return request;
}

void QueuedStep::run(const LocalStep& local, StepResult& result) {
  result.loss = result.grad_norm = result.lr = result.loss_scale = std::numeric_limits<double>::quiet_NaN();
  result.outcome_ = queue(local, result.step);
}

std::shared_ptr<StepOutcome> QueuedStep::queue(const LocalStep& local, std::int64_t number) {
  const Span span("step on the device");
  InFlight& slot = take_slot();
  send_host_part(slot, local);
  norm_->finish();
  uploaded_->join();
  if (messages_ != message_) {
    const Timed timed(&exposed_);
    throw_if_error(axes_->world->all_gather("step", message_, messages_, message_bytes_).wait());
  }
  if (downloaded_) join_downloads();
  is_begun_ = false;
  kernels_.decide(request(), tables_);
  messages_read_ = kernels_.mark();
  forget_losses();
  if (updates_in_backward()) {
    end_pass();
  } else if (matrices_) {
    update_with_matrices();
  } else {
    update_all();
  }
  slot.used_arrived = used_downloaded_ = kernels_.download(slot.used.get(), tables_.used, parameters_);
  downloaded_ = kernels_.download(slot.decision.get(), tables_.decision, sizeof(DeviceDecision));
  ++steps_;
  slot.outcome = std::make_shared<StepOutcome>(number, slot.decision, exposed_.take(), downloaded_, axes_, unit_names_);
  return slot.outcome;
}

/// Elements, then matrices. What is used of them is known on the device alone, so all are exchanged; those without gradients are zeros.
void QueuedStep::update_with_matrices() {
  const auto update = [&](const DeviceRun& run) { kernels_.update(run, tables_); };
  const auto pass_over = [&](bool matrices) {
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      if (groups_[i].is_of_matrices() == matrices) pass_over_group(i, update, [](std::size_t) {});
    }
  };
  pass_over(false);
  const MuonMomentumConstants momentum = matrices_->muon_of(FlatParameter::kNoGroup).momentum_constants();
  for (const Group& g : groups_) {
    if (g.is_of_matrices()) kernels_.muon_directions(g.directions, momentum, tables_);
  }
  matrices_->exchange([](std::size_t) { return MatrixUpdate::Numbers{}; });
  pass_over(true);
  end_pass();
}

/// The last decision and its flags have been fetched before others take their place.
void QueuedStep::join_downloads() const {
  used_downloaded_->join();
  downloaded_->join();
}

void QueuedStep::update_all() {
  const std::optional<UpdateRates> rates = begin_on_host();
  begin_gradients();
  pass_over_runs([&](const DeviceRun& run) { kernels_.update(run, tables_); },
                 [&](std::size_t group) {
                   if (rates) host_->update(group, *rates);
                 });
  let_gradients_go();
  updates_ = false;
}

/// The step's own. Waits for the step that used it last, of which the host then knows what became.
QueuedStep::InFlight& QueuedStep::take_slot() {
  InFlight& slot = ring_[static_cast<std::size_t>(steps_ % kMostStepsInFlight)];
  if (!slot.outcome) return slot;
  request_.known_skipped = slot.outcome->wait().skipped;
  slot.used_arrived->wait();
  const auto* const used = reinterpret_cast<const char*>(slot.used.get());
  known_used_.assign(used, used + parameters_);
  return slot;
}

/// Where the host updates: waits for the device's decision, and returns what it is, unless that is to skip the step.
std::optional<UpdateRates> QueuedStep::begin_on_host() {
  if (!host_) return std::nullopt;
  const Span span("wait for the device's decision");
  host_->fetch_parameters();
  DeviceDecision decision{};
  fetch_state(&decision, tables_.decision, sizeof decision, device_.device);
  throw_if_error(axes_->status());
  if (decision.is_skipped) return std::nullopt;
  std::vector<char> used(parameters_);
  fetch_state(used.data(), tables_.used, static_cast<std::int64_t>(used.size()), device_.device);
  host_->begin(used);
  return UpdateRates{decision.gradient_scale, static_cast<float>(strategy_.gradient_clip_value), decision.lr};
}

/// Copies what the host knows into this rank's message, while backward is still computed: counts, and a flag for each
/// parameter that got a gradient, and rates of groups. It lies behind the loss, which the device adds up.
void QueuedStep::send_host_part(InFlight& slot, const LocalStep& local) {
  StepMessageHeader header;
  header.tokens = local.tokens;
  header.samples = local.samples;
  header.gathers = digest_of_gathers(local.gathered);
  std::byte* const message = slot.message.get();
  std::memcpy(message, &header, sizeof header);
  std::byte* flag = message + sizeof header;
  for (const Group& g : groups_) {
    for (std::size_t i = 0; i < g.group->parameters.size(); ++i) *flag++ = std::byte{reducer_.used(*g.group, i)};
  }
  constexpr std::size_t kBehindLoss = sizeof header.loss;
  const DeviceKernels::UploadPiece piece{message_ + kBehindLoss, message + kBehindLoss, sums_offset_ - kBehindLoss};
  uploaded_ = kernels_.upload({&piece, 1}, messages_read_.get());
  if (!updates_in_backward()) send_rates(slot);
}

/// Those of parameter groups, where there are some. What is queued from now on finds them.
void QueuedStep::send_rates(InFlight& slot) {
  const std::span<const double> rates = rates_.all().subspan(1);
  if (rates.empty()) return;
  std::memcpy(slot.rates.get(), rates.data(), rates.size_bytes());
  const DeviceKernels::UploadPiece piece{group_lr_, slot.rates.get(), rates.size_bytes()};
  kernels_.upload({&piece, 1}, messages_read_.get())->join();
}

/// The schedule's ratio depends on how many of the steps under way are skipped. The host does not know that yet, so it
/// sends the ratio for every possible number.
StepRequest QueuedStep::request() const {
  StepRequest request = request_;
  request.base_lr = rates_.everybodys();
  for (int more = 0; more <= kMostStepsInFlight; ++more) {
    const std::int64_t applied = std::max<std::int64_t>(0, steps_ - request_.known_skipped - more);
    request.lr_ratios[more] = lr_ratio_at(strategy_.lr_schedule, resumed_at_ + applied);
  }
  return request;
}

StepProgress QueuedStep::progress() const {
  wait_for_all();
  const DeviceDecision decision = latest();
  StepProgress progress{decision.applied, decision.scaler, {}, {rates_.all().begin(), rates_.all().end()}};
  std::vector<std::int64_t> counts(parameters_);
  fetch_state(counts.data(), tables_.steps, bytes_of_counts(counts), device_.device);
  auto count = counts.begin();
  for (const Group& g : groups_) {
    for (const FlatParameter& parameter : g.group->parameters) {
      progress.updates[parameter.tensor.unsafeGetTensorImpl()] = *count++;
    }
  }
  return progress;
}

void QueuedStep::resume(const StepProgress& progress) {
  wait_for_all();
  std::vector<std::int64_t> counts;
  for (const Group& g : groups_) {
    for (const FlatParameter& parameter : g.group->parameters) {
      const auto found = progress.updates.find(parameter.tensor.unsafeGetTensorImpl());
      counts.push_back(found == progress.updates.end() ? 0 : found->second);
    }
  }
  DeviceDecision decision{};
  decision.applied = progress.applied;
  decision.scaler = progress.scaler;
  write_state(tables_.steps, counts.data(), bytes_of_counts(counts), device_.device);
  if (host_) host_->resume(counts);
  write_state(tables_.decision, &decision, sizeof decision, device_.device);
  resumed_at_ = progress.applied;
  request_.known_skipped = steps_ = 0;
  for (InFlight& slot : ring_) slot.outcome.reset();
  if (!progress.rates.empty()) rates_.restore(progress.rates);
}

void QueuedStep::wait_for_all() const {
  for (std::int64_t step = std::max<std::int64_t>(0, steps_ - kMostStepsInFlight); step < steps_; ++step) {
    ring_[static_cast<std::size_t>(step % kMostStepsInFlight)].outcome->wait();
  }
}

DeviceDecision QueuedStep::latest() const {
  if (steps_ > 0) return ring_[static_cast<std::size_t>((steps_ - 1) % kMostStepsInFlight)].outcome->wait();
  DeviceDecision none{};
  fetch_state(&none, tables_.decision, sizeof none, device_.device);
  return none;
}

}  // namespace tessera
