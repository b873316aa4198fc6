// This file makes one step of training, in this order: begin_backward and end_backward for each microbatch, take_step,
// begin_next_step. Meanwhile hooks pass gradients to the reducer, and the gathering provides values. This file decides
// when each of these begins and ends.

#include "engine/training/training.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/parameters/parameter_checks.h"
#include "engine/step/agree/gather_order.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"
#include "tessera/sync_buffers.h"

namespace tessera {

MemoryUse Training::allocated(When when) const {
  const bool now = when == When::kNow;
  MemoryUse use = footprint.allocated;
  if (gathering.residency) {
    const ResidencyCounts& gathers = gathering.residency->counts();
    use[MemoryCategory::kSlots] += now ? gathers.overflow_bytes : gathers.overflow_peak;
  }
  const ReducerCounts& reductions = gradients.reducer->counts();
  use[MemoryCategory::kBuckets] += now ? reductions.overflow_bytes : reductions.overflow_peak;
  return use;
}

void Training::begin_backward(const MicrobatchInfo& info) {
  const Span span("checks");
  times.data.end();  // the wait for data ends here at the latest, since a forward on another thread does not end it
  window.rounds.announce(RoundLog::kBackward);
  times.mark(UseTimes::Event::kBackward);
  if (window.statistics) window.statistics->begin_backward();
  if (activations) hook_saved_tensors(activations);  // a program may train on a thread that did not make the Engine
  expect_parameters();
  gradients.hooks->follow();
  if (window.microbatch > 0) gradients.hooks->expect_untouched();
  const std::int64_t plain_steps = job.strategy.compression.start_step;
  gradients.reducer->square_own(measures_noise());
  gradients.reducer->use_methods(plain_steps == 0 || step->applied() >= plain_steps, times.attempts + 1);
  // Backward changes memory that the commit reads.
  if (updates_in_backward() || kept_gradient_bytes(plan) > 0) settle_commit();
  if (updates_in_backward())
    gradients.reducer->begin_round(digest_of_gathers(gathering.log->entries()), info.weight, info.samples);
  if (!claims && window.microbatch + 1 == microbatches()) step->expect_update(gradients.reducer->order());
  window.rounds.add(RoundLog::kBackward);
}

/// Prepares for the microbatch that this rank computes next. If none is left, ranks agree on who has computed which
/// microbatch.
void Training::follow_claims() {
  if (!claims) return;
  window.asked.reset();
  gradients.reducer->begin_backup(claims->turn());
  if (claims->next()) return;
  const MicrobatchOrder& made = claims->agree();
  step->deal(made);
  gradients.reducer->deal(made);
  step->expect_update(gradients.reducer->order());
}

bool Training::passes_over_microbatch() {
  if (!claims || !claims->is_overtaken()) return false;
  times.data.end();
  times.mark(UseTimes::Event::kBackward);
  expect_parameters();
  if (window.statistics) window.statistics->drop_microbatch();
  claims->pass_over();
  ++window.microbatch;  // the step has begun, so zero_grad and a save come too late
  follow_claims();
  step->pass_over_loss();
  if (step_is_due()) {
    gradients.reducer->finish(/*reduce=*/true);
  } else {
    seed_microbatch();
    times.data.begin(std::chrono::steady_clock::now());
  }
  times.mark(UseTimes::Event::kBackwardEnd);
  return true;
}

bool Training::end_round(bool ends, bool has_batch) {
  window.rounds.announce(ends ? RoundLog::kEnd : RoundLog::kEndOfLoss);
  const std::int64_t round = claims ? claims->round() : window.microbatch;
  const bool counts = !claims || claims->end();
  if (window.statistics) {
    window.statistics->end_backward();
    if (ends) counts ? window.statistics->end_microbatch(round) : window.statistics->drop_microbatch();
  }
  if (ends && job.strategy.reproducible) gradients.reducer->end_microbatch(counts);
  follow_claims();
  const bool last = ends && (claims ? step_is_due() : window.microbatch + 1 == microbatches());
  gradients.reducer->finish(last || job.strategy.gradient_sync == GradientSync::kEachMicrobatch, has_batch);
  if (gathering.residency) gathering.residency->end_round();
  window.rounds.add(RoundLog::kEnd);
  window.rounds.end_round();
  return counts;
}

void Training::end_backward(const at::Tensor& loss, const MicrobatchInfo& info) {
  const std::int64_t round = claims ? claims->round() : window.microbatch;
  const bool counts = end_round(/*ends=*/!info.retain_graph, /*has_batch=*/true);
  if (counts && info.weight > 0)
    step->add_loss(loss, info.weight, round);
  else
    step->pass_over_loss();
  if (counts) window.local.tokens += info.tokens;
  if (info.retain_graph) {
    window.weight = info.weight;
  } else {
    ++window.microbatch;
    if (counts) {
      window.local.samples += info.samples;  // all losses of a microbatch come from the same samples
      window.local.weight += info.weight;
    }
    note_own_microbatch(info.weight);
    window.weight.reset();
    window.rounds.end_microbatch();
    seed_microbatch();
    if (!step_is_due()) times.data.begin(std::chrono::steady_clock::now());
  }
  times.mark(UseTimes::Event::kBackwardEnd);
}

double Training::communication_seconds() const {
  const bool is_told_later = job.accelerator.device.is_queued && !sync.config().has_common_parameters();
  if (is_told_later) return 0;  // StepResult::wait asks the device
  const auto& [log, publication, parts, residency, watch] = gathering;
  const double gathers = residency ? residency->counts().gather_seconds : publication ? publication->seconds() : 0;
  const double sums =
      axes.world->size() > 1 ? gradients.reducer->counts().reduction_seconds : 0;  // a single rank sends nothing
  const double claiming = (claims ? claims->communication_seconds() : 0) +
                          (window.statistics ? window.statistics->communication_seconds() : 0);
  return gathers + sums + claiming + step->communication_seconds() + sync.communication_seconds();
}

StepResult Training::take_step() {
  times.mark(UseTimes::Event::kStep);
  times.data.end();
  if (times.flops) times.flop = times.flops->counted();
  times.flops.reset();
  {
    const Span span("checks");
    expect_parameters();
    gradients.hooks->expect_untouched();
  }
  settle_commit();
  window.local.gathered = gathering.log->entries();
  note_own_step();
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - times.last_end;
  window.local.busy_seconds = since.count() - (communication_seconds() - times.communication_before);
  StepResult result;
  result.step = times.attempts + 1;
  step->run(window.local, result);
  if (claims) result.made_again = claims->made_again();
  times.attempts = result.step;  // a rank that was late has skipped steps ("sync" backups)
  if (latencies && latencies->by_device) latencies->by_device->end_step();
  make_buffers_alike();
  sync.after(times.attempts);
  deal_next_step();
  if (const std::int64_t every = job.strategy.check.replica_hash_every; every > 0 && times.attempts % every == 0) {
    const Span span("compare replicas");
    if (gathering.publication) gathering.publication->finish();
    if (job.accelerator.device.is_queued) static_cast<void>(step->progress());  // this waits for the steps under way
    expect_equal_replicas(units, plan, *job.axes.control, times.attempts);
  }
  forget_what_is_skipped(result);
  if (times.attempts == 1 && job.accelerator.allocated) note_activations();
  if (times.attempts == 1 && activations) note_offloaded_activations();
  result.planned = plan.use();
  result.allocated = allocated(When::kAtMost);
  begin_next_step();
  const auto now = std::chrono::steady_clock::now();
  result.seconds = std::chrono::duration<double>(now - times.last_end).count();
  result.communication_seconds = communication_seconds() - times.communication_before;
  times.communication_before += result.communication_seconds;
  note_times(result);
  if (Trace::on()) Trace::record("step", {}, times.last_end, now);
  result.tokens_per_second = static_cast<double>(result.tokens) / result.seconds;
  times.last_end = now;
  times.last_seconds = result.seconds;
  times.mark(UseTimes::Event::kStepEnd);
  times.data.begin(now);
  return result;
}

/// Decides who computes which microbatches from the next step on. All ranks have the same times for which each rank was
/// busy.
void Training::deal_next_step() {
  if (!dealer || step->busy_seconds().empty()) return;
  const std::span<const std::int64_t> computed = claims ? claims->computed() : std::span<const std::int64_t>();
  if (!dealer->add(step->busy_seconds(), computed)) return;
  const MicrobatchOrder& order = dealer->order();
  step->deal(order);
  gradients.reducer->deal(order);
  if (job.mesh.rank() != 0) return;
  std::string counts;
  for (int rank = 0; rank < order.ranks; ++rank)
    counts += (rank > 0 ? ", " : "") + std::to_string(order.count_of(rank));
  log_info("after step " + std::to_string(times.attempts) + " ranks compute " + counts +
           " microbatches a step, by their speeds");
  warn_of_data_not_dealt();
}

/// Warns if the program does not use the deal. If it divides samples evenly instead, some samples would be used twice
/// or left out, without an error.
void Training::warn_of_data_not_dealt() {
  if (std::exchange(window.knows_microbatches, true)) return;
  log_warning(
      "\"deal\" by speed gives ranks different numbers of microbatches, and the program has not asked which are this "
      "rank's: samples that it shares out evenly are taken twice, or by nobody. [T0937] hint: before each step give "
      "Engine::microbatches() to TokenBatches::deal or RankSampler::deal, or take the rows of Engine::microbatch()");
}

/// If the step's gradients are dropped, gives the residuals their values from before the step, or drops them if there
/// is no copy. The host of a GPU waits here for the decision, since the next step's reductions add to the residuals.
void Training::forget_what_is_skipped(const StepResult& result) {
  if (plan.sums().kept_gradient_numel == 0) return;
  StepResult known = result;
  if (job.accelerator.device.is_queued) known.wait();
  if (known.overflow || known.spike) gradients.reducer->restore_feedback();
}

/// Notes how the step's time was spent, apart from collectives.
void Training::note_times(StepResult& result) {
  const DataSeconds brought = data_seconds_of_this_thread();
  result.data_seconds = times.data.take();
  // The difference may be below 0: each thread has its own sums, and the thread that drives the Engine may have
  // changed.
  result.batch_seconds = std::max(0.0, brought.batches - times.brought.batches);
  result.upload_seconds = std::max(0.0, brought.uploads - times.brought.uploads);
  times.brought = brought;
  result.flop = times.flop;
  result.peak_tflops = times.peak_tflops;
}

void Training::time_calls(std::unique_ptr<CallLatencies> known) {
  if (latencies) return;
  latencies = known ? std::move(known) : std::make_unique<CallLatencies>(units.size());
  if (job.accelerator.device.is_queued) {
    if (latencies->by_device) latencies->by_device->wait();  // its kernels are destroyed with the old Training
    latencies->by_device = std::make_unique<QueuedCallTimes>(*job.accelerator.kernels);
  }
  QueueTimes* const queue = latencies->by_device.get();
  gradients.reducer->time_reductions(latencies->reductions, queue);
  if (gathering.residency) gathering.residency->time_gathers(latencies->gathers, queue);
  if (gathering.publication) gathering.publication->time_gathers(latencies->gathers);
  sync.time_pulls(latencies->gathers);
}

void Training::bring_replicas_together(const char* what) {
  // While averages ("ema") are in the place of masters, no outer step is made. Until a save, each replica has its own
  // averages.
  if (!sync.is_due() || values.are_averages) return;
  expect(values.open_guards == 0, what,
         " between two outer steps makes one, which cannot be under a Gathered guard. [T0156] hint: close it first");
  expect(window.microbatch == 0, what,
         " between backward and step makes an outer step (\"sync\"). [T0157] hint: call step() or zero_grad() first");
  job.or_abort(what, [&] {
    expect_parameters();
    // Other ranks of this replica may still be reading the copy that they share.
    if (plan.placement().shared) throw_if_error(axes.gather->barrier("outer step").wait());
    drop_gathered();
    sync.step();
    times.attempts += sync.take_skipped();
    accept_new_values();
  });
}

/// Notes once how much memory the first step needed beyond the memory that was allocated before the step.
void Training::note_activations() {
  const AllocatedBytes bytes = job.accelerator.allocated();
  footprint.activation_bytes = bytes.peak - footprint.at_start;
  if (job.mesh.rank() != 0) return;
  log_info("the first step needed " + format_bytes(*footprint.activation_bytes) + " of activations beside the plan's " +
           format_bytes(plan.use().total()) + "; LibTorch's allocator had " + format_bytes(bytes.peak) +
           " in use at most");
}

/// Logs how many bytes of activations the first step put on their tier and brought back.
void Training::note_offloaded_activations() const {
  if (job.mesh.rank() != 0) return;
  const ActivationCounts counts = activations->counts();
  log_info("the first step put " + format_bytes(counts.bytes_put) + " of activations in " +
           std::to_string(counts.values) + " pieces of memory on tier \"" +
           (job.strategy.offload.activations == Tier::kHost ? "host" : "nvme") + "\", at most " +
           format_bytes(counts.peak_bytes) + " at a time, and brought " + format_bytes(counts.bytes_got) + " back");
}

/// Makes buffers equal on all ranks, as Strategy::broadcast_buffers says. It is called before microbatches are dealt
/// anew.
void Training::make_buffers_alike() {
  const BufferBroadcast wanted = job.strategy.broadcast_buffers;
  if (wanted == BufferBroadcast::kMicrobatchOrder) {
    if (!window.statistics) return;
    const MicrobatchOrder even = microbatch_order(job.strategy, job.mesh.world_size());
    return window.statistics->apply(claims ? claims->order() : dealer ? dealer->order() : even);
  }
  if (wanted == BufferBroadcast::kNone || job.mesh.world_size() == 1) return;
  const Span span("buffers");
  sync_buffers(*job.module, job.mesh, wanted == BufferBroadcast::kMean ? BufferSync::kMean : BufferSync::kFromRankZero);
}

void Training::begin_next_step() {
  if (gathering.residency) gathering.residency->release_all();
  gathering.log->reset();
  if (claims) claims->begin_step(dealer->order());
  drop_microbatches();
  // The reducer waits for all gradients if units are updated in backward, or if sums are a tree over microbatches. In
  // these cases a unit that was treated as complete could not take another gradient. Moreover, a step in which no
  // microbatch counted does not predict the next step.
  const bool waits_for_all = updates_in_backward() || job.strategy.reproducible;
  const std::vector<char>* const used = waits_for_all ? nullptr : step->known_used();
  if (used && std::ranges::any_of(*used, [](char each) { return each != 0; })) gradients.reducer->expect(*used);
  for (auto& unit : units) unit->reopen();
  accept_new_values();
  if (gathering.residency) gathering.residency->gather_ahead();
}

void Training::drop_gathered() {
  for (auto& unit : units) {
    if (unit->keeper()) unit->keeper()->drop(*unit);
  }
}

void Training::accept_new_values() {
  for (auto& unit : units) unit->gathered_hash = 0;
  // Backward of graphs that were made before must not use the new values.
  for_each_trainable(units, [](FlatGroup& group) {
    for (FlatParameter& parameter : group.parameters) parameter.tensor.unsafeGetTensorImpl()->bump_version();
  });
  step->pass_over_loss();  // operators that brought the values belong to no microbatch, so a replay must not report
                           // them
  const Span span("checks");
  values.checks->accept();
}

void Training::drop_microbatches() {
  gradients.reducer->reset();
  if (gradients.norm) gradients.norm->reset();
  gradients.hooks->begin_step();
  if (window.statistics) window.statistics->drop_step();
  window.begin();
  seed_microbatch();
}

}  // namespace tessera
