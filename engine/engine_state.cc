#include "engine/engine_state.h"

#include <limits>
#include <string>
#include <utility>

#include "engine/checkpoint/stored_states.h"
#include "engine/job/last_words.h"
#include "engine/job/outcomes.h"
#include "engine/job/profiler_ranges.h"
#include "engine/memory/carried_states.h"
#include "engine/step/agree/update_options.h"
#include "runtime/base/log.h"
#include "runtime/border/throw.h"

namespace tessera {
namespace {

/// Opens this rank's files and finds the last commit that all ranks hold. It is collective. Throws tessera::Error, the
/// same on every rank: the errors of DurableFiles::look and choose.
std::unique_ptr<DurableFiles> open_durable(const DurableConfig& config, const MemoryPlan& plan,
                                           const std::string& layout, const Job& job, Collectives& control,
                                           bool has_moved) {
  const Topology& topology = job.mesh.topology();
  std::vector<int> hosts = topology.ranks_of_hosts;
  if (hosts.empty()) hosts.assign(static_cast<std::size_t>(topology.num_hosts()), topology.local_world_size);
  auto files = std::make_unique<DurableFiles>(config, plan, layout, std::move(hosts), control.rank());
  files->choose(value_or_throw(share_outcomes(control, "commits found", [&] { return files->look(); })), has_moved);
  throw_if_error(share_status(control, "commits chosen", status_from([&] { return files->forget_later(); })));
  if (files->last() && control.rank() == 0)
    log_info(c10::str(files->folder(), " holds step ", files->last()->step, ", from which resume_durable goes on"));
  return files;
}

}  // namespace

Engine::State::State(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<Strategy> strategy, const Mesh& mesh,
                     OwnRules own_rules, std::optional<std::int64_t> continues_after)
    : job(std::move(module), std::move(strategy), mesh, std::move(own_rules)),
      training(job, continues_after.value_or(0)),
      saving(job) {
  training.settle_commit = [this] { saving.settle_commit(); };
  training.look_at_module();
  try {
    job.or_abort("Engine", [&] { set_up(continues_after.has_value()); });
  } catch (...) {
    training.detach_parameters();
    throw;
  }
}

void Engine::State::set_up(bool continues) {
  const Strategy& strategy = job.strategy;
  show_spans_to_profilers();
  job.join();
  training.axes = training.sync.axes(job.mesh, job.axes, job.accelerator.device.is_queued);
  if (strategy.checkpoint.async) saving.group = value_or_throw(groups_of(job.mesh).world("checkpoint"));
  training.make_plan(continues);
  if (strategy.durable.every > 0) {
    if (!continues) saving.moved = move_commits(job);
    saving.durable = open_durable(strategy.durable, training.plan,
                                  durable_layout(training.plan, training.units, *job.module, strategy), job,
                                  *training.axes.control, continues || saving.moved.has_value());
  }
  training.set_up(saving.durable.get(), continues);
  if (strategy.sync.has_servers() && !strategy.sync.is_elastic()) note_joined();
}

std::unique_ptr<Engine::State> Engine::State::planned_anew(std::int64_t steps, const std::function<void()>& change,
                                                           std::shared_ptr<Strategy> other) {
  Training& t = training;
  StepProgress progress = t.step->progress();
  change();
  t.frozen_states.keep_masters(t.units, t.plan.placement().optimizer, job.position, *job.axes.control);
  const CarriedStates states(t.units, t.plan, job.position, t.memory, t.axes);
  const StoredStates stored(job.strategy, job.own_rules, t.units);
  const auto name_of = [&](const FlatGroup& group, std::size_t state) -> const std::string& {
    return stored.name_in(group, state);
  };
  t.detach_parameters();
  auto next = std::make_unique<State>(job.module, other ? std::move(other) : job.given_strategy, job.mesh,
                                      job.own_rules, steps);
  Training& then = next->training;
  Collectives& control = *next->job.axes.control;
  then.frozen_states = std::move(t.frozen_states);
  states.write_to(then.units, control, name_of, then.frozen_states, progress.updates);
  then.frozen_states.note_updates(progress.updates);
  then.frozen_states.give_back(then.units, control, name_of, progress.updates);
  then.report_frozen_states();
  const std::size_t groups = next->job.strategy.optimizer.groups.size();
  progress.rates.resize(1 + groups, std::numeric_limits<double>::quiet_NaN());
  progress.options.resize((1 + groups) * UpdateOptions::kNumbers, std::numeric_limits<double>::quiet_NaN());
  then.step->resume(progress);
  then.times.attempts = t.times.attempts;
  then.window.seed = t.window.seed;
  then.seed_microbatch();
  if (t.times.data.looks()) then.times.data.look();
  then.times.peak_tflops = t.times.peak_tflops;
  if (t.latencies) then.time_calls(std::move(t.latencies));
  then.window.has_looked_at_loss = t.window.has_looked_at_loss;
  then.window.knows_microbatches = t.window.knows_microbatches;
  next->job.exceptions_at_start = job.exceptions_at_start;
  next->saving.ends_in_step = saving.ends_in_step;
  return next;
}

bool Engine::State::follow_sync(std::unique_ptr<State>& state, std::int64_t steps) {
  Training& t = state->training;
  if (!t.sync.changes_after(steps)) return false;
  std::unique_ptr<State> replaced;  // keeps the old State, to which `t` refers, until the change is over
  t.job.or_abort("\"sync\"", [&] {
    t.expect_parameters();
    t.bring_replicas_together("\"sync\"");
    auto next = state->planned_anew(steps, [] {});
    next->training.window.rounds = t.window.rounds;
    replaced = std::exchange(state, std::move(next));
  });
  if (state->job.mesh.rank() == 0)
    log_info("after step " + std::to_string(steps) +
             (state->training.sync.is_apart() ? " replicas train by themselves between outer steps"
                                              : " gradients are summed over replicas in every step"));
  return true;
}

}  // namespace tessera
