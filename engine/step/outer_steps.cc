#include "engine/step/outer_steps.h"

#include <algorithm>
#include <span>
#include <utility>

#include "engine/memory/state_views.h"
#include "runtime/base/status.h"
#include "runtime/border/throw.h"
#include "runtime/comm/sum/wire_codec.h"
#include "sharding/memory_view.h"
#include "sharding/unrecorded.h"
#include "tessera/span.h"

namespace tessera {

// This file makes outer steps, one group after the other, through an OuterPlace.
//
// `after` does the work that is due. A whole outer step (`step`) reads a group's masters into one buffer (`read_own`),
// turns them into outer gradients if there are outer weights, averages them over the replicas, and writes the result
// back (`publish`). Streaming cuts this in two: `send` begins the sums of a fragment, and `apply_sent` waits for them
// and applies them later. `meet` also averages states. A replica that made no update has no share in that average
// (`agree_on_counts`).

namespace {

OuterRule rule_of(const SyncConfig& config, int replicas) {
  return {.lr = static_cast<float>(config.outer.lr),
          .momentum = static_cast<float>(config.outer.momentum),
          .mix = static_cast<float>(config.mix),
          .replicas = static_cast<float>(replicas)};
}

}  // namespace

OuterSteps::OuterSteps(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan, const MeshAxes& replica,
                       MeshAxes whole, std::unique_ptr<OuterPlace> place, QueueClock* waits)
    : plan_(plan),
      replica_(replica),
      whole_(std::move(whole)),
      replicate_(whole_.replicate),
      config_(plan.update().outer),
      place_(std::move(place)),
      rule_(rule_of(config_, replicate_->size())),
      waits_(waits) {
  const OuterNumel& numel = plan.passes().outer;
  const c10::Device device = place_->device();
  flat_ = Arena::plain("masters on their way", numel.largest * 4, device);
  sent_ = Arena::plain("outer gradients on their way", numel.sent * 4, device);
  if (config_.has_outer_optimizer()) {
    weights_ = Arena::plain("outer weights", numel.part * 4, device);
    momentum_ = Arena::plain("outer momentum", numel.part * 4, device);
  }
  for (std::size_t i = 0; i < units.size(); ++i) {
    for (const auto& group : units[i]->groups) {
      if (!group->trainable) continue;
      const std::int64_t bytes = group->optimizer_part.numel * 4;
      Outer outer{group.get(), nullptr, nullptr, static_cast<std::int64_t>(i) % config_.fragments};
      if (config_.has_outer_optimizer()) {
        outer.weights = reinterpret_cast<float*>(weights_.take(bytes));
        outer.momentum = reinterpret_cast<float*>(momentum_.take(bytes));
      }
      groups_.push_back(outer);
    }
  }
  weights_.expect_full();
  momentum_.expect_full();
  adopt();
}

OuterSteps::~OuterSteps() {
  for (Sent& sent : under_way_) static_cast<void>(sent.work.wait());  // the work writes to this object's memory
}

void OuterSteps::drop_sent() {
  for (Sent& sent : under_way_) throw_if_error(sent.work.wait());
  under_way_.clear();
}

std::int64_t OuterSteps::memory_bytes() const { return weights_.bytes() + momentum_.bytes(); }

OuterRun OuterSteps::run_of(const Outer& outer, OuterWork work, float* values) const {
  return {.work = work,
          .numel = static_cast<std::size_t>(outer.group->optimizer_part.numel),
          .values = values,
          .weights = outer.weights,
          .momentum = outer.momentum,
          .rule = rule_};
}

float* OuterSteps::read_own(const FlatGroup& group) {
  const Unrecorded unrecorded;
  place_->read(group, flat());
  return flat() + group.optimizer_part.offset;
}

void OuterSteps::adopt() {
  drop_sent();
  is_due_ = false;
  if (!config_.has_outer_optimizer()) return;
  for (const Outer& outer : groups_) place_->pass(run_of(outer, OuterWork::kTake, read_own(*outer.group)));
}

void OuterSteps::forget_momentum() {
  if (!config_.has_outer_optimizer()) return;
  const Unrecorded unrecorded;
  flat_view(momentum_.data(), DType::kU8, momentum_.bytes(), place_->device()).zero_();
}

void OuterSteps::after(std::int64_t step_number) {
  is_due_ = true;
  if (config_.type != SyncType::kStreamingDiloco) {
    if (step_number % config_.every == 0) step();
    return;
  }
  if (!under_way_.empty() && step_number >= arrives_) apply_sent();
  for (std::int64_t fragment = 0; fragment < config_.fragments; ++fragment) {
    const std::int64_t turn = (fragment + 1) * config_.every / config_.fragments;
    if (step_number % config_.every == turn % config_.every) send(fragment, step_number);
  }
}

void OuterSteps::step() {
  const Span span("outer step");
  if (!under_way_.empty()) apply_sent();
  for (const Outer& outer : groups_) step(outer);
  wait_until_published();
  is_due_ = false;
}

void OuterSteps::step(const Outer& outer) {
  FlatGroup& group = *outer.group;
  const std::int64_t numel = group.optimizer_part.numel;
  float* const values = read_own(group);
  if (config_.has_outer_optimizer()) {
    write_gradients(outer, values, values);
    mean_over_replicas(group.unit->name, values, numel, options());
    place_->pass(run_of(outer, OuterWork::kStep, values));
  } else {
    mean_over_replicas(group.unit->name, values, numel);
  }
  publish(group);
}

void OuterSteps::send(std::int64_t fragment, std::int64_t step_number) {
  const Span span("send outer gradients");
  auto* at = reinterpret_cast<float*>(sent_.data());
  for (const Outer& outer : groups_) {
    if (outer.fragment != fragment) continue;
    const Extent part = outer.group->optimizer_part;
    write_gradients(outer, read_own(*outer.group), at);
    Work work;
    if (part.numel > 0) {
      ReduceOptions beside = options();
      // A sum in shared memory is so fast that it need not run in the background, and only a few such sums may be under
      // way. A GPU makes each of its sums while work that is queued later runs.
      if (replicate_->reduces_in_background()) beside.waits = Waits::kLater;
      work = sum_over_replicas(outer.group->unit->name, at, part.numel, beside);
    }
    under_way_.push_back({&outer, at, std::move(work)});
    at += part.numel;
  }
  // If hosts make the sums of GPUs, a sum begins with this call. The sum then runs at the same time as the steps that
  // follow.
  if (waits_ && plan_.outer_sums_on_host().slots > 0) {
    for (Sent& sent : under_way_) throw_if_error(sent.work.advance());
  }
  arrives_ = step_number + config_.delay;
  if (config_.delay == 0) apply_sent();
}

void OuterSteps::apply_sent() {
  const Span span("apply outer gradients");
  for (Sent& sent : under_way_) {
    wait_for(sent.work, sent.outer->group->unit->name);
    const Outer& outer = *sent.outer;
    divide_by_replicas(sent.gradients, outer.group->optimizer_part.numel);
    place_->pass(run_of(outer, OuterWork::kStep, sent.gradients));
    place_->pass(run_of(outer, OuterWork::kMix, read_own(*outer.group)));
    publish(*outer.group);
  }
  under_way_.clear();
  wait_until_published();
}

/// Writes this replica's outer gradients.
void OuterSteps::write_gradients(const Outer& outer, const float* own, float* gradients) {
  OuterRun run = run_of(outer, OuterWork::kGradients, gradients);
  run.own = own;
  place_->pass(run);
}

void OuterSteps::publish(FlatGroup& group) {
  const Extent part = group.optimizer_part;
  const Placement& placement = plan_.placement();
  const bool gathers = placement.optimizer.shard && !placement.parameters.shard && replica_.shard_size > 1;
  if (gathers) {
    const auto bytes = static_cast<std::size_t>(part.numel) * 4;
    const GatherOptions options{.dtype = DType::kF32, .form = plan_.wire().gathers};
    const Span span("publish", group.unit->name, &seconds_);
    const Timed timed(waits_);
    throw_if_error(replica_.gather->all_gather(group.unit->name, flat() + part.offset, flat(), bytes, options).wait());
  }
  const Unrecorded unrecorded;  // must not live during the next group's gather, since it hides spans from profilers
  const Extent written = gathers ? Extent{0, group.layout.numel()} : part;
  place_->write(group, flat() + written.offset, written);
}

void OuterSteps::wait_until_published() {
  if (!plan_.placement().shared) return;
  const Span span("publish", {}, &seconds_);
  throw_if_error(replica_.gather->barrier("outer step").wait());
}

ReduceOptions OuterSteps::options() const {
  const CompressionConfig& compression = plan_.wire().compression;
  ReduceOptions options;
  options.contributions = compression.gradients;
  options.sums = compression.sums;
  return options;
}

void OuterSteps::mean_over_replicas(const std::string& label, float* values, std::int64_t numel,
                                    const ReduceOptions& options) {
  if (numel == 0) return;
  Work work = sum_over_replicas(label, values, numel, options);
  wait_for(work, label);
  divide_by_replicas(values, numel);
}

Work OuterSteps::sum_over_replicas(const std::string& label, float* values, std::int64_t numel,
                                   const ReduceOptions& options) {
  const Span span("reduce", label, &seconds_);  // ranks that share memory make the whole sum inside this scope
  const auto count = static_cast<std::size_t>(numel);
  ++sums_;
  sent_bytes_ += static_cast<std::int64_t>(wire_bytes(options.contributions, DType::kF32, count));
  return replicate_->all_reduce(label, values, DType::kF32, values, count, options);
}

void OuterSteps::wait_for(Work& work, const std::string& label) {
  const Span span("wait", label, &seconds_);
  const Timed timed(waits_);
  throw_if_error(work.wait());
}

void OuterSteps::divide_by_replicas(float* values, std::int64_t numel) {
  place_->pass({.work = OuterWork::kMean, .numel = static_cast<std::size_t>(numel), .values = values, .rule = rule_});
}

void OuterSteps::meet(Step& inner) {
  if (is_due_) step();
  StepProgress progress = inner.progress();
  std::vector<std::int64_t*> counts = {&progress.applied, &progress.samples};
  for (const Outer& outer : groups_) {
    for (const FlatParameter& parameter : outer.group->parameters)
      counts.push_back(&progress.updates[parameter.tensor.unsafeGetTensorImpl()]);
  }
  const std::vector<double> shares = agree_on_counts(counts);
  average_states(std::span(shares).subspan(2));
  inner.resume(progress);
}

/// Gives all replicas the largest of each count. Replicas that skipped a step, or did not use a parameter, have smaller
/// counts. Returns, for each count, a factor for this replica's states. The factor is the number of all replicas
/// divided by the number of replicas that made updates. So the mean over all replicas becomes the mean over the
/// replicas that made updates. The factor is 0 if this replica made no update, since its states mean nothing without
/// updates. It is 1 if no replica made an update.
std::vector<double> OuterSteps::agree_on_counts(std::span<std::int64_t* const> counts) {
  std::vector<std::int64_t> own;
  for (const std::int64_t* count : counts) own.push_back(*count);
  const auto replicas = static_cast<std::size_t>(whole_.replicate_size);
  const auto shard = static_cast<std::size_t>(whole_.shard_index);
  Collectives& control = *whole_.control;  // not `replicate_`, which may communicate from a GPU's memory
  std::vector<std::int64_t> all(own.size() * static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather("counts of updates", own.data(), all.data(), own.size() * sizeof own[0]).wait());
  std::vector<double> shares;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::size_t updated = 0;
    for (std::size_t r = 0; r < replicas; ++r) {
      const std::size_t rank = r * static_cast<std::size_t>(whole_.shard_size) + shard;
      const std::int64_t count = all[rank * counts.size() + i];
      updated += count > 0 ? 1 : 0;
      *counts[i] = std::max(*counts[i], count);
    }
    shares.push_back(updated == 0 ? 1 : own[i] == 0 ? 0 : static_cast<double>(replicas) / static_cast<double>(updated));
  }
  return shares;
}

/// Multiplies each parameter's elements in `values` by the parameter's factor. `values` has the elements `run` of the
/// group.
void OuterSteps::scale_parameters(const FlatGroup& group, Extent run, std::span<const double> factors, float* values) {
  for (std::size_t i = 0; i < factors.size(); ++i) {
    const Extent own = intersect(group.layout.extent(i), run);
    if (own.numel <= 0 || factors[i] == 1) continue;
    place_->pass({.work = OuterWork::kScale,
                  .numel = static_cast<std::size_t>(own.numel),
                  .values = values + (own.offset - run.offset),
                  .rule = rule_,
                  .factor = static_cast<float>(factors[i])});
  }
}

/// All states are fp32; sync_rules.cc ensures this. `shares` [parameter, in the order of groups]: the factors of
/// agree_on_counts.
void OuterSteps::average_states(std::span<const double> shares) {
  for (const Outer& outer : groups_) {
    const FlatGroup& group = *outer.group;
    const std::span<const double> of_group = shares.first(group.parameters.size());
    shares = shares.subspan(group.parameters.size());
    for_each_state(group, StateKind::kMastersAndStates, group.optimizer_part, StateUse::kUpdateStates,
                   [&](const StateView& view) {
                     for (std::size_t state = 0; state < group.records.state().states.size(); ++state) {
                       auto* const values = reinterpret_cast<float*>(view.state[state].data);
                       scale_parameters(group, view.run, of_group, values);
                       mean_over_replicas(group.unit->name, values, view.run.numel);
                     }
                   });
  }
}

absl::Status OuterSteps::for_each_momentum(const VisitMomentum& visit) const {
  if (!config_.has_outer_optimizer()) return absl::OkStatus();
  for (const Outer& outer : groups_) {
    const Extent part = outer.group->optimizer_part;
    for (std::size_t i = 0; i < outer.group->parameters.size(); ++i) {
      const Extent run = intersect(outer.group->layout.extent(i), part);
      if (run.numel <= 0) continue;
      TESSERA_RETURN_IF_ERROR(visit(*outer.group, i, run, outer.momentum + (run.offset - part.offset)));
    }
  }
  return absl::OkStatus();
}

}  // namespace tessera
