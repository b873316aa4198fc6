#include "engine/step/queued/queued_step.h"

#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "engine/step/agree/gather_order.h"
#include "engine/step/agree/gradient_norm.h"
#include "engine/step/agree/loss_spikes.h"
#include "engine/step/agreed_numbers.h"
#include "optim/layerwise_optimizer.h"
#include "optim/loss_scale.h"
#include "optim/lr_schedule.h"
#include "optim/master_assigner.h"
#include "runtime/border/throw.h"
#include "sharding/host_view.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {

// This file queues a step. The host's part of the message is copied to the device, the device decides, and the outcome
// is copied to the host later.
//
// `queue` first waits for the step that last used the slot of this step (`take_slot`). It copies the host's part of
// this rank's message to the device (`send_host_part`), gathers the messages of all ranks, queues the decision and the
// update, and queues the copies of the decision and the flags into the slot. The host does not know yet how many of the
// steps under way are skipped, so `request` has the schedule's ratio for each possible number. `progress` and `resume`
// wait for all steps first.

namespace {

const RuleOptimizer& rules_of(const Optimizer& optimizer) {
  if (const auto* const own = dynamic_cast<const OwnOptimizer*>(&optimizer)) return own->bare();
  if (const auto* const assigner = dynamic_cast<const MasterAssigner*>(&optimizer)) return assigner->elements();
  if (const auto* const layers = dynamic_cast<const LayerwiseOptimizer*>(&optimizer)) return layers->elements();
  const auto* const rules = dynamic_cast<const RuleOptimizer*>(&optimizer);
  TORCH_INTERNAL_ASSERT(rules, "an optimizer without kernels");
  return *rules;
}

template <class T>
std::int64_t bytes_of(std::span<T> values) {
  return static_cast<std::int64_t>(values.size_bytes());
}

}  // namespace

QueuedStep::QueuedStep(const StepContext& context, const Optimizer& optimizer, Accelerator& accelerator)
    : axes_(std::make_shared<MeshAxes>(context.axes)),
      reducer_(context.reducer),
      strategy_(context.strategy),
      kernels_(*accelerator.kernels),
      exposed_(*accelerator.exposed),
      device_(accelerator.device),
      numbers_(strategy_.optimizer),
      totals_(norm_totals(context.units, owners_of_parts(context.plan.placement().gradients, *axes_).size())),
      memory_(device_.device),
      update_({context, kernels_, device_, numbers_.rates}, rules_of(optimizer), tables_, memory_),
      request_(update_.request()) {
  static_cast<DecisionRule&>(request_) =
      decision_rule(strategy_, axes_->world->size() * strategy_.gradient_accumulation, context.replicas);
  tables_.updates_in_backward = strategy_.optimizer.in_backward;
  if (strategy_.reproducible)
    tables_.rounds = static_cast<int>(microbatch_order(strategy_, axes_->world->size()).most_rounds());
  OutcomeContext of_outcomes{axes_, {}, strategy_.on_spike};
  for (const auto& unit : context.units) {
    if (updates_in_backward()) of_outcomes.units.push_back(unit->name);
  }
  of_outcomes_ = std::make_shared<const OutcomeContext>(std::move(of_outcomes));
  plan_message();
  allocate(scales_loss() ? first_loss_scale(strategy_.mixed_precision.loss_scale) : LossScalerState{});
  fill_tables(owners_of_parts(context.plan.placement().gradients, *axes_));
  std::vector<FlatGroup*> flat_groups;
  for (const DeviceUpdate::Group& g : update_.groups()) flat_groups.push_back(g.group);
  const bool by_unit = context.memory.gpu.gradients || updates_in_backward();
  norm_.emplace(flat_groups, reinterpret_cast<double*>(message_.own + tables_.messages.sums_offset), by_unit, kernels_,
                device_.device);
  if (strategy_.noise_scale.every > 0) squares_.emplace(context.units, views_.own_squares, kernels_, device_.device);
}

void QueuedStep::plan_message() {
  tables_.messages.lay_out(update_.parameters(), static_cast<std::size_t>(tables_.rounds),
                           strategy_.noise_scale.every > 0, totals_.most_sums());
}

void QueuedStep::allocate(const LossScalerState& scaler) {
  message_.own = memory_.take<std::byte>(tables_.messages.bytes);
  const auto ranks = static_cast<std::size_t>(axes_->world->size());
  message_.of_all = ranks == 1 ? message_.own : memory_.take<std::byte>(ranks * tables_.messages.bytes);

  StepDecision first{};
  first.scaler = scaler;
  tables_.decision = memory_.put<StepDecision>({&first, 1});
  const auto options = at::TensorOptions().device(device_.device);
  views_.loss = at::from_blob(message_.own + offsetof(StepMessageHeader, loss), {1}, options.dtype(at::kDouble));
  if (tables_.messages.own_offset > 0)
    views_.own_squares = at::from_blob(message_.own + tables_.messages.own_offset + offsetof(OwnGradients, squares),
                                       {1}, options.dtype(at::kDouble));
  if (tables_.rounds > 0)
    views_.losses =
        at::from_blob(message_.own + tables_.messages.losses_offset, {tables_.rounds, 2}, options.dtype(at::kDouble));
  views_.loss_scale = at::from_blob(&tables_.decision->scaler.scale, {}, options.dtype(at::kFloat));
  for (InFlight& slot : flight_.ring) {
    slot.message = kernels_.pinned_memory(tables_.messages.losses_offset);
    slot.decision = kernels_.pinned_memory(sizeof(StepDecision));
    slot.used = kernels_.pinned_memory(update_.parameters());
  }
  numbers_.of_groups = update_.group_numbers();
  const std::size_t groups = numbers_.of_groups.size();
  if (groups == 0) return;
  tables_.group_numbers = numbers_.there = memory_.take<GroupNumbers>(groups);
  for (InFlight& slot : flight_.ring) slot.numbers = kernels_.pinned_memory(groups * sizeof(GroupNumbers));
}

/// Fills all tables except those of groups and their parameters, which DeviceUpdate fills.
void QueuedStep::fill_tables(const std::vector<int>& ranks_with_parts) {
  StepTables& t = tables_;
  const std::size_t parameters = update_.parameters();
  t.ranks = axes_->world->size();
  t.shard_size = axes_->shard_size;
  t.messages.of_all = message_.of_all;
  t.norm.tensors = static_cast<int>(totals_.tensors());
  t.norm.part_ranks = memory_.put<std::int32_t>(ranks_with_parts);
  t.norm.links = memory_.put<NormLink>(totals_.links());
  t.norm.first_link = memory_.put<std::uint32_t>(totals_.first_link());
  t.norm.link_scratch = memory_.take<double>(totals_.links().size());
  t.norm.squares = memory_.take<double>(totals_.tensors());
  t.norm.sum_of_squares = memory_.take<double>(1);
  t.used = memory_.take<std::uint8_t>(parameters);
  t.is_uniform = memory_.take<std::uint8_t>(update_.groups().size());
  t.constants = memory_.take<RuleConstants>(parameters);
  t.steps = memory_.take<std::int64_t>(parameters);
  if (watches_for_spikes()) t.losses = memory_.take<double>(static_cast<std::size_t>(request_.spikes.window));
}

void QueuedStep::add_loss(const at::Tensor& loss, double weight, std::int64_t round) {
  const Unrecorded unrecorded;
  at::Tensor counted = loss.detach().reshape({1}).to(at::kDouble);
  if (weight != 1.0) counted = counted.mul(weight);
  if (tables_.rounds > 0) {
    views_.losses.select(0, round).narrow(0, 0, 1).add_(counted);
    views_.losses.select(0, round).narrow(0, 1, 1).fill_(weight);  // all losses of a microbatch have the same weight
  }
  views_.loss.add_(counted.div(static_cast<double>(strategy_.gradient_accumulation)));
}

double QueuedStep::lr(std::optional<std::size_t> group) const {
  return next_lr(strategy_, latest(), request_.replicas, numbers_.rates, group);
}

void QueuedStep::expect_update(std::span<const int> order) {
  backward_.sums_are_steps = !updates_in_backward();
  if (updates_in_backward()) send_numbers(take_slot());  // numbers must be copied before records
  update_.expect(order);
}

void QueuedStep::reduced(const Unit& unit) {
  if (backward_.sums_are_steps) norm_->add(unit);
  update_.fetch(unit);
}

void QueuedStep::forget_losses() {
  backward_.sums_are_steps = false;
  update_.forget();
  const Unrecorded unrecorded;
  views_.loss.zero_();
  if (tables_.rounds > 0) views_.losses.zero_();
  if (squares_) views_.own_squares.zero_();
}

LossSeed QueuedStep::seed_of(const at::Tensor& loss, double weight) const {
  const Unrecorded unrecorded;
  LossSeed result{at::ones_like(loss), {}};
  if (scales_loss() && loss.scalar_type() != at::kHalf) {
    result.seed.mul_(views_.loss_scale);
  } else if (scales_loss()) {
    result.seed.mul_(views_.loss_scale.clamp_max(kMostFp16Seed));
    result.factor = views_.loss_scale.div(kMostFp16Seed).clamp_min(1.0);
  }
  weigh(result, weight);
  return result;
}

void QueuedStep::update(Unit& unit, const UnitAgreement& agreed) {
  if (marks_.downloaded && !std::exchange(backward_.is_begun, true)) {
    join_downloads();                               // the device waits for copies of the previous step
    if (update_.waits_before_exchange()) latest();  // throws the previous step's error before any new error
  }
  norm_->add(unit);
  const std::span<const double> sums = norm_->sums_of(unit);
  UnitRequest of_unit = update_.request_for(unit);
  of_unit.sums = sums.data();
  of_unit.sum_count = static_cast<std::uint32_t>(sums.size());
  of_unit.used = agreed.used_there;
  of_unit.weight = agreed.weight_there;
  of_unit.samples = agreed.samples_there;
  of_unit.differ = agreed.differ_there;
  of_unit.digest_bits = static_cast<std::uint32_t>(agreed.digest_bits);
  kernels_.begin_unit(request(), of_unit, tables_);
  update_.update(unit);
}

void QueuedStep::swap_averages() { update_.swap_averages(); }

void QueuedStep::run(const LocalStep& local, StepResult& result) {
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  result.loss = result.grad_norm = result.lr = result.loss_scale = kUnknown;
  if (squares_) result.noise_scale = result.noise_batch = result.noise_square = result.noise_variance = kUnknown;
  result.outcome_ = queue(local, result.step);
}

std::shared_ptr<StepOutcome> QueuedStep::queue(const LocalStep& local, std::int64_t number) {
  const Span span("step on the device");
  InFlight& slot = take_slot();
  send_host_part(slot, local);
  norm_->finish();
  marks_.uploaded->join();
  if (message_.of_all != message_.own) {
    const Timed timed(&exposed_);
    throw_if_error(axes_->world->all_gather("step", message_.own, message_.of_all, tables_.messages.bytes).wait());
  }
  if (marks_.downloaded) join_downloads();
  backward_.is_begun = false;
  kernels_.decide(request(), tables_);
  marks_.messages_read = kernels_.mark();
  forget_losses();
  updates_in_backward() ? update_.finish() : update_.update();
  if (numbers_.there) marks_.numbers_read = kernels_.mark();
  slot.used_arrived = marks_.used_downloaded = kernels_.download(slot.used.get(), tables_.used, update_.parameters());
  marks_.downloaded = kernels_.download(slot.decision.get(), tables_.decision, sizeof(StepDecision));
  ++flight_.steps;
  slot.outcome = std::make_shared<StepOutcome>(number, slot.decision, exposed_.take(), marks_.downloaded, of_outcomes_);
  return slot.outcome;
}

/// Makes later work on the device wait until the last decision and its flags are on the host. A new decision and new
/// flags then overwrite them on the device.
void QueuedStep::join_downloads() const {
  marks_.used_downloaded->join();
  marks_.downloaded->join();
}

/// Returns this step's slot. It waits for the step that used the slot last; the host then knows the outcome of that
/// step.
QueuedStep::InFlight& QueuedStep::take_slot() {
  InFlight& slot = flight_.ring[static_cast<std::size_t>(flight_.steps % kMostStepsInFlight)];
  if (!slot.outcome) return slot;
  request_.known_skipped = slot.outcome->wait().so_far.skipped;
  slot.used_arrived->wait();
  const auto* const used = reinterpret_cast<const char*>(slot.used.get());
  flight_.known_used.assign(used, used + update_.parameters());
  return slot;
}

/// Copies the host's part of this rank's message to the device, while backward is still computed. The device itself
/// adds up the loss and OwnGradients::squares, which are the first fields of their parts, and writes losses and sums.
/// The numbers of groups are sent too (send_numbers), unless units are updated in backward.
void QueuedStep::send_host_part(InFlight& slot, const LocalStep& local) {
  LocalStep told = local;
  told.rates = numbers_.rates.all();
  told.options = numbers_.options.all();
  const StepMessages& layout = tables_.messages;
  std::byte* const message = slot.message.get();
  write_numbers(told, layout, message);
  std::byte* flag = message + sizeof(StepMessageHeader);
  for (const DeviceUpdate::Group& g : update_.groups()) flag = write_flags(*g.group, reducer_, flag);
  constexpr std::size_t kCounted = sizeof(double);
  static_assert(offsetof(StepMessageHeader, weight) == kCounted && offsetof(OwnGradients, weights) == kCounted);
  const auto piece = [&](std::size_t begin, std::size_t end) {
    return DeviceKernels::UploadPiece{message_.own + begin + kCounted, message + begin + kCounted,
                                      end - begin - kCounted};
  };
  const std::size_t own = layout.own_offset, end = layout.losses_offset;
  const DeviceKernels::UploadPiece pieces[] = {piece(0, own > 0 ? own : end), piece(own, end)};
  marks_.uploaded = kernels_.upload(std::span(pieces).first(own > 0 ? 2 : 1), marks_.messages_read.get());
  if (!updates_in_backward()) send_numbers(slot);
}

/// Sends the learning rates and other numbers of parameter groups, if there are groups. Kernels that are queued from
/// now on use these numbers.
void QueuedStep::send_numbers(InFlight& slot) {
  follow_options();
  if (!numbers_.there) return;
  const std::span<const double> rates = numbers_.rates.all().subspan(1);
  for (std::size_t i = 0; i < rates.size(); ++i) numbers_.of_groups[i].lr = rates[i];
  const std::size_t bytes = numbers_.of_groups.size() * sizeof(GroupNumbers);
  std::memcpy(slot.numbers.get(), numbers_.of_groups.data(), bytes);
  const DeviceKernels::UploadPiece piece{numbers_.there, slot.numbers.get(), bytes};
  kernels_.upload({&piece, 1}, marks_.numbers_read.get())->join();
}

/// Each launch gets numbers from the host. A change of these numbers therefore takes effect in the steps that are
/// queued from now on.
void QueuedStep::follow_options() {
  if (std::exchange(numbers_.followed, numbers_.options.version()) == numbers_.options.version()) return;
  update_.follow(numbers_.options);
  const StepRequest anew = update_.request();
  request_.numbers = anew.numbers;
  request_.of_matrices = anew.of_matrices;
  numbers_.of_groups = update_.group_numbers();
}

/// The schedule's ratio depends on how many of the steps under way are skipped. The host does not know this number yet,
/// so it sends the ratio for every possible number.
StepRequest QueuedStep::request() const {
  StepRequest request = request_;
  request.base_lr = numbers_.rates.everybodys();
  request.warm_up = sample_warm_up(strategy_.lr_schedule);
  for (int more = 0; more <= kMostStepsInFlight; ++more) {
    const std::int64_t applied = std::max<std::int64_t>(0, flight_.steps - request_.known_skipped - more);
    request.lr_ratios[more] = lr_ratio_at(strategy_.lr_schedule, flight_.resumed_at + applied);
  }
  return request;
}

StepProgress QueuedStep::progress() const {
  wait_for_all();
  const StepDecision decision = latest();
  StepProgress progress = progress_of(decision, numbers_.rates, numbers_.options);
  if (watches_for_spikes()) {
    LossSpikes spikes(strategy_.on_spike);
    spikes.state() = decision.spikes;
    fetch_state(spikes.losses().data(), tables_.losses, bytes_of(spikes.losses()), device_.device);
    progress.losses = spikes.history();
  }
  std::vector<std::int64_t> counts(update_.parameters());
  fetch_state(counts.data(), tables_.steps, bytes_of(std::span(counts)), device_.device);
  auto count = counts.begin();
  for (const DeviceUpdate::Group& g : update_.groups()) {
    for (const FlatParameter& parameter : g.group->parameters) {
      progress.updates[parameter.tensor.unsafeGetTensorImpl()] = *count++;
    }
  }
  return progress;
}

void QueuedStep::resume(const StepProgress& progress) {
  wait_for_all();
  std::vector<std::int64_t> counts;
  for (const DeviceUpdate::Group& g : update_.groups()) {
    for (const FlatParameter& parameter : g.group->parameters) {
      const auto found = progress.updates.find(parameter.tensor.unsafeGetTensorImpl());
      counts.push_back(found == progress.updates.end() ? 0 : found->second);
    }
  }
  StepDecision decision{};
  decision.samples = latest().samples;  // `lr` assumes that the next step has as many samples as this one
  tessera::resume(progress, strategy_, decision, numbers_.rates, numbers_.options);
  if (watches_for_spikes()) {
    LossSpikes spikes(strategy_.on_spike);
    spikes.restore(progress.losses);
    decision.spikes = spikes.state();
    write_state(tables_.losses, spikes.losses().data(), bytes_of(spikes.losses()), device_.device);
  }
  write_state(tables_.steps, counts.data(), bytes_of(std::span(counts)), device_.device);
  update_.resume(counts);
  write_state(tables_.decision, &decision, sizeof decision, device_.device);
  flight_.resumed_at = progress.applied;
  request_.known_skipped = flight_.steps = 0;
  for (InFlight& slot : flight_.ring) slot.outcome.reset();
}

void QueuedStep::wait_for_all() const {
  for (std::int64_t step = std::max<std::int64_t>(0, flight_.steps - kMostStepsInFlight); step < flight_.steps;
       ++step) {
    flight_.ring[static_cast<std::size_t>(step % kMostStepsInFlight)].outcome->wait();
  }
}

StepDecision QueuedStep::latest() const {
  if (flight_.steps > 0)
    return flight_.ring[static_cast<std::size_t>((flight_.steps - 1) % kMostStepsInFlight)].outcome->wait();
  StepDecision none{};
  fetch_state(&none, tables_.decision, sizeof none, device_.device);
  return none;
}

}  // namespace tessera
