// This file has the public Engine. Each call checks that it is allowed now (Training), and calls the part of the Engine
// that does the work. Job::or_abort reports a failure to all ranks. The functions that plan without an Engine
// (plan_memory) are at the end.

#include "tessera/engine.h"

#include <ATen/ops/full.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <list>
#include <utility>

#include "engine/detailed_plan.h"
#include "engine/engine_checkpoints.h"
#include "engine/engine_state.h"
#include "engine/job/last_words.h"
#include "engine/job/plan_scene.h"
#include "engine/job/run_scope.h"
#include "engine/memory/records/device_gradients.h"
#include "engine/memory/records/gradient_records.h"
#include "engine/memory/records/tier_carrier.h"
#include "engine/parameters/parameter_groups.h"
#include "engine/replay/replay_request.h"
#include "engine/step/rules/own_optimizer.h"
#include "engine/step/rules/tensor_rule.h"
#include "engine/training/microbatch_statistics.h"
#include "runtime/base/log.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/strategy_file.h"
#include "sharding/partition.h"
#include "sharding/reduce/comm_hook_method.h"
#include "tessera/span.h"

namespace tessera {
namespace {

std::shared_ptr<Strategy> with_defaults(const Strategy& given, const Mesh& mesh) {
  auto strategy = std::make_shared<Strategy>(as_replayed(as_launched(given), mesh.world_size()));
  fill_in_defaults(strategy->optimizer);
  return strategy;
}

/// Throws if the ranks of a plan would not wait for each other, and have neither memory in common nor servers. A run
/// gets this error from its transport (ReplicaSync::axes).
void expect_one_host(const Strategy& strategy, const Topology& topology) {
  const bool need_memory = strategy.sync.has_common_parameters() && !strategy.sync.has_servers();
  if (!need_memory || topology.num_hosts() == 1) return;
  throw Error(ExitCode::kConfig,
              "/sync/type: ranks that do not wait for each other have parameters in memory that they share, and here "
              "are " +
                  std::to_string(topology.num_hosts()) +
                  " hosts. [T0897] hint: plan for all ranks on one host, or leave \"sync\" out");
}

PlannedMemory numbers_of(const MemoryPlan& plan) {
  return {plan.use(),
          plan.records().disk,
          plan.records().streamed_bytes,
          plan.passes().host_step,
          plan.slots().uploaded_bytes,
          plan.records().gradient_copies,
          plan.to_table()};
}

}  // namespace

Engine::Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
               const OwnRules& own)
    : state_(std::make_unique<State>(std::move(module), with_defaults(strategy, mesh), mesh, own, std::nullopt)) {}

Engine::~Engine() {
  auto& [job, training, saving] = *state_;
  // If an exception is unwinding the stack, the other ranks must not wait for this rank.
  const bool unwinding = std::uncaught_exceptions() > job.exceptions_at_start;
  if (unwinding && RunScope::current) RunScope::current->memory_story = job.memory_story("");
  MeshGroups& groups = groups_of(job.mesh);
  if (unwinding && !job.failed && !(groups.keep_for_report(job.axes) && groups.keep_for_report(training.axes)))
    job.fail(make_error(ExitCode::kInternal, "an exception ended the training loop"));
  if (saving.under_way && (unwinding || job.failed)) saving.under_way->cancel();
  saving.leave_commit();
  if (!unwinding && !job.failed) training.take_newest_values();
  training.detach_parameters();
}

void Engine::backward(const at::Tensor& loss, const MicrobatchInfo& info) { tessera::backward(loss, {this}, info); }

void Engine::backward_nothing() {
  Training& training = state_->training;
  training.expect_nothing();
  training.job.or_abort("backward_nothing", [&] { training.run_nothing(); });
}

/// Backward starts with the first engine's loss scale, so this scale applies to the gradients of all engines. A factor
/// for each other engine corrects this to the engine's own scale.
std::vector<at::Tensor> Engine::State::factors_of(const std::vector<Engine*>& engines, const LossSeed& first) {
  const double scale = engines[0]->loss_scale();
  std::vector<at::Tensor> factors = {first.factor};
  for (std::size_t i = 1; i < engines.size(); ++i) {
    const double ratio = engines[i]->loss_scale() / scale;
    at::Tensor factor = first.factor;
    if (ratio != 1.0) factor = factor.defined() ? factor * ratio : at::full({}, ratio, at::kFloat);
    factors.push_back(std::move(factor));
  }
  return factors;
}

/// Runs one backward. Only gradients for the parameters of `engines` are used.
void Engine::State::run_backward(const at::Tensor& loss, const std::vector<Engine*>& engines,
                                 const MicrobatchInfo& info) {
  const Span span("backward");
  if (engines[0]->state_->training.passes_over_microbatch()) return;
  for (Engine* engine : engines) engine->state_->training.begin_backward(info);
  const bool counts = info.weight > 0;
  const LossSeed seed = engines[0]->state_->training.step->seed_of(loss, counts ? info.weight : 1.0);
  const std::vector<at::Tensor> factors = factors_of(engines, seed);
  {
    std::list<GradientHooks::Taking> taking;
    for (std::size_t i = 0; i < engines.size(); ++i)
      taking.emplace_back(*engines[i]->state_->training.gradients.hooks, factors[i], counts);
    torch::autograd::backward({loss}, {seed.seed}, info.retain_graph);
  }
  for (Engine* engine : engines) engine->state_->training.end_backward(loss, info);
}

void backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info) {
  expect(!engines.empty(), phrases::kBackward,
         " wants at least one Engine. [T0135] hint: list those whose modules the loss went through");
  for (auto engine = engines.begin(); engine != engines.end(); ++engine) {
    expect(*engine != nullptr, phrases::kBackward,
           " was given an Engine that is null. [T0136] hint: leave it out of the list, or make it first");
    expect(std::find(engines.begin(), engine, *engine) == engine, phrases::kBackward,
           " was given an Engine twice. [T0137] hint: list each Engine once, whatever the loss does with its module");
    (*engine)->state_->training.expect_microbatch(loss, info);
    expect(engines.size() == 1 || !(*engine)->state_->training.claims, phrases::kBackward,
           " of several Engines under deal.backups: each would claim microbatches by itself. [T0940] hint: leave "
           "deal.backups out");
  }
  for (Engine* engine : engines) engine->state_->training.warn_of_factor(loss);
  try {
    engines[0]->state_->job.or_abort("backward", [&] { Engine::State::run_backward(loss, engines, info); });
  } catch (...) {
    for (Engine* engine : engines) engine->state_->job.fail(groups_of(engines[0]->state_->job.mesh).status());
    throw;
  }
}

bool Engine::step_is_due() const { return state_->training.step_is_due(); }

StepResult Engine::step(bool partial) {
  auto& [job, training, saving] = *state_;
  training.expect_step(partial);
  if (!step_is_due()) training.expect_nothing();
  while (!step_is_due()) backward_nothing();
  training.expect_weights("step");
  expect(training.values.open_guards == 0,
         "step under Gathered. [T0140] hint: close that guard first, since step changes what it shows");
  bool saved = false;
  const StepResult result = job.or_abort("step", [&, &job = job, &training = training, &saving = saving] {
    StepResult taken = training.take_step();
    // The host waits here, so that it knows before the next step begins whether to go back to a checkpoint. Otherwise
    // it would run ahead of a GPU.
    if (job.strategy.on_spike.action == SpikeAction::kRollback) taken.wait();
    saved = saving.ends_in_step && saving.save_has_ended();
    return taken;
  });
  if (result.spike && job.strategy.on_spike.action == SpikeAction::kRollback) {
    EngineCheckpoints(*this).go_back(result.step);
    saved = saving.ends_in_step;  // go_back has waited for the save
  }
  if (saved) EngineCheckpoints(*this).finish();  // `finish` may throw, but the step was made
  State::follow_sync(state_, training.times.attempts);
  return result;
}

void Engine::zero_grad() {
  Training& training = state_->training;
  training.expect_not_updated("zero_grad");
  expect(!training.claims || training.window.microbatch == 0,
         "zero_grad between backward and step under deal.backups: other ranks count on the microbatches of this rank. "
         "[T0941] hint: call step() first, or leave deal.backups out");
  training.job.or_abort("zero_grad", [&] {
    // The gradients are dropped, so the residuals that compression kept of these gradients are dropped too.
    if (training.window.microbatch > 0 && training.plan.sums().kept_gradient_numel > 0)
      training.gradients.reducer->restore_feedback();
    training.drop_microbatches();
    training.step->forget_losses();
    if (training.times.flops) training.times.flops->clear();
  });
}

std::int64_t Engine::microbatch() const {
  Window& window = state_->training.window;
  window.knows_microbatches = true;
  window.asked = state_->training.microbatch();
  return *window.asked;
}
std::optional<std::int64_t> Engine::take_step(std::int64_t steps, std::int64_t data_order) {
  Training& training = state_->training;
  ServedShards* const served = training.sync.elastic();
  expect(served != nullptr,
         "take_step is for workers that come and go. [T1014] hint: set \"elastic\" in \"sync\", with \"owners\": "
         "\"servers\"");
  return training.job.or_abort("take_step", [&] {
    const std::optional<std::int64_t> step = served->take_step(steps, data_order);
    if (served->is_over()) training.accept_new_values();
    if (served->finishes()) note_results_to_write(/*are_left=*/true);
    return step;
  });
}
bool Engine::steps_are_over() const {
  const ServedShards* const served = state_->training.sync.elastic();
  return served && served->is_over();
}
bool Engine::writes_results() const {
  const ServedShards* const served = state_->training.sync.elastic();
  return served ? served->finishes() : state_->job.mesh.rank() == 0;
}

void Engine::note_results_written() {
  Training& training = state_->training;
  ServedShards* const served = training.sync.elastic();
  if (!served) return;
  training.job.or_abort("note_results_written", [&] {
    try {
      served->end_results();
    } catch (const Error& error) {
      if (error.exit_code() == ExitCode::kUsage) throw;  // another worker writes them
      log_warning(
          "the results are written, but server 0 cannot note it, so a worker that comes later may write them "
          "again: " +
          error.message());
    }
    note_results_to_write(/*are_left=*/false);
  });
}

MicrobatchRun Engine::microbatches() const {
  state_->training.window.knows_microbatches = true;
  return state_->training.run_of_step();
}

const Strategy& Engine::strategy() const { return state_->job.strategy; }
PlannedMemory Engine::plan() const { return numbers_of(state_->training.plan); }
MemoryUse Engine::allocated() const { return state_->training.allocated(Training::When::kNow); }
void Engine::check() const {
  throw_if_error(state_->job.axes.status());
  throw_if_error(state_->training.axes.status());
}

Upload Engine::upload(const std::vector<at::Tensor>& host) { return state_->job.uploader->start(host); }

at::Device Engine::device() const { return state_->job.accelerator.device.device; }

std::optional<std::int64_t> Engine::activation_bytes() const { return state_->training.footprint.activation_bytes; }

void Engine::set_lr(double lr) { state_->training.set_lr(nullptr, lr); }
void Engine::set_lr(const std::string& group, double lr) { state_->training.set_lr(&group, lr); }

double Engine::lr() const { return state_->training.step->lr(std::nullopt); }
double Engine::lr(const std::string& group) const {
  return state_->training.step->lr(state_->training.index_of_group("lr", group));
}

void Engine::set_option(const std::string& name, double value) {
  state_->training.set_option(nullptr, name, {&value, 1});
}

void Engine::set_option(const std::string& name, std::pair<double, double> value) {
  const double numbers[] = {value.first, value.second};
  state_->training.set_option(nullptr, name, numbers);
}

void Engine::set_option(const std::string& group, const std::string& name, double value) {
  state_->training.set_option(&group, name, {&value, 1});
}

void Engine::set_option(const std::string& group, const std::string& name, std::pair<double, double> value) {
  const double numbers[] = {value.first, value.second};
  state_->training.set_option(&group, name, numbers);
}

std::map<std::string, std::vector<double>> Engine::options() const {
  return state_->training.options(FlatParameter::kNoGroup);
}

std::map<std::string, std::vector<double>> Engine::options(const std::string& group) const {
  return state_->training.options(state_->training.index_of_group("options", group));
}

std::int64_t Engine::steps_applied() const { return state_->training.step->applied(); }

std::int64_t Engine::samples_seen() const { return state_->training.step->samples_seen(); }

void Engine::set_epoch_samples(std::int64_t samples) { state_->training.set_epoch_samples(samples); }

double Engine::loss_scale() const { return state_->training.step->loss_scale(); }

TrafficCounts Engine::traffic() const {
  const Training& t = state_->training;
  TrafficCounts counts;
  if (t.gathering.residency) {
    const ResidencyCounts& gathers = t.gathering.residency->counts();
    counts.gathers = gathers.gathers;
    counts.gathered_bytes = gathers.gathered_bytes;
    counts.gather_seconds = gathers.gather_seconds;
    counts.prefetched_gathers = gathers.prefetched;
    counts.overflow_slots = gathers.overflow_slots;
  }
  const ReducerCounts& reductions = t.gradients.reducer->counts();
  counts.reductions = reductions.reductions;
  counts.reduced_bytes = reductions.reduced_bytes;
  counts.reduction_seconds = reductions.reduction_seconds;
  counts.overflow_buckets = reductions.overflow_buckets;
  t.sync.add_to(counts);
  const auto add = [&](const TierCounters& disk) {
    counts.disk_bytes_read += disk.bytes_read;
    counts.disk_bytes_written += disk.bytes_written;
    counts.disk_wait_seconds += disk.wait_seconds;
  };
  const TrainingMemory& memory = t.memory;
  if (memory.records.parameters) add(memory.records.parameters->counters());
  if (memory.records.states) add(memory.records.states->counters());
  if (memory.records.tensor_states) add(memory.records.tensor_states->counters());
  if (memory.records.gradients) add(memory.records.gradients->counters());
  if (memory.gpu.gradients) {
    add(memory.gpu.gradients->counters());
    counts.gradients = memory.gpu.gradients->copied();
  }
  counts.streamed_bytes = t.step ? t.step->streamed_bytes() : 0;
  if (t.step) counts.host_step = t.step->host_step();
  if (t.gathering.parts) counts.uploaded_bytes = t.gathering.parts->uploaded_bytes();
  if (t.activations) {
    const ActivationCounts disk = t.activations->counts();
    counts.disk_bytes_read += disk.disk_bytes_read;
    counts.disk_bytes_written += disk.disk_bytes_written;
    counts.disk_wait_seconds += disk.disk_wait_seconds;
  }
  return counts;
}

void Engine::time_data() { state_->training.times.data.look(); }

void Engine::set_peak_tflops(double tflops) {
  expect(std::isfinite(tflops) && tflops > 0, "set_peak_tflops wants a number above 0, got ", tflops,
         ". [T0817] hint: give the device's peak in 10^12 floating-point operations a second");
  state_->training.times.peak_tflops = tflops;
}

double Engine::peak_tflops() const { return state_->training.times.peak_tflops; }

void Engine::time_calls() { state_->training.time_calls(); }

AgeHistogram Engine::staleness() const { return state_->training.step->ages(); }

std::vector<CallLatency> Engine::latencies() const {
  const Training& training = state_->training;
  std::vector<CallLatency> found;
  if (!training.latencies) return found;
  if (training.latencies->by_device) training.latencies->by_device->wait();
  const auto add = [&](const char* call, const std::vector<LatencyHistogram>& of_units) {
    for (std::size_t i = 0; i < of_units.size(); ++i) {
      const LatencyHistogram& times = of_units[i];
      if (times.count() == 0) continue;
      found.push_back({call, training.units[i]->name, times.count(), times.percentile(50), times.percentile(95),
                       times.percentile(99), times.max()});
    }
  };
  add("gather", training.latencies->gathers);
  add("reduce", training.latencies->reductions);
  return found;
}

void Engine::enter_forked_process() {
  auto& [job, training, saving] = *state_;
  training.gathering.watch.reset();
  static_cast<void>(saving.under_way.release());  // the thread, the lock and the files belong to the parent process
  if (saving.durable) saving.durable->enter_forked_process();
  static_cast<void>(saving.durable.release());
  if (training.activations) training.activations->enter_forked_process();
  if (training.gathering.publication) training.gathering.publication->give_up();
  // If a fork has copied all parameters (private memory), they can still be read.
  if (!training.gathering.residency && !training.plan.placement().shared) return;
  for (auto& unit : training.units) {
    unit->poison("unit " + unit->name +
                 " is sharded over ranks, and this process was forked from one: it has no part in their collectives. "
                 "[T0144] hint: compute with the model in the training process only");
  }
}

std::vector<std::string> Engine::unit_names() const {
  std::vector<std::string> names;
  for (const auto& unit : state_->training.units) names.push_back(unit->name);
  return names;
}

MemoryPlan plan_in_detail(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own_rules) {
  expect_comm_hook(strategy.compression, own_rules.comm_hook.get());
  expect_one_host(strategy, topology);
  const MeshShape shape = mesh_shape(strategy, topology);
  const MeshPosition position = shape.position_of(topology.rank);
  const auto optimizer = make_optimizer(strategy.optimizer, strategy.ema, own_rules);
  PlanScene scene = plan_scene(strategy.sync, position, topology, planned_abilities(strategy, shape, topology));
  scene.statistics_numel = MicrobatchStatistics::numel_of(module, strategy);
  const int parts = parts_for(strategy, position);
  const auto units = partition(module, strategy, parts, nullptr, matrices_of(strategy.optimizer));
  add_tensor_states(units, make_tensor_rule(strategy.optimizer, own_rules).get(), parts);
  assign_groups(units, strategy.optimizer);
  return make_plan(units, strategy, scene, *optimizer);
}

PlannedMemory plan_memory(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own) {
  return numbers_of(plan_in_detail(module, strategy, topology, own));
}

}  // namespace tessera
