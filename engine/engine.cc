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
#include "engine/job/mesh_shape.h"
#include "engine/job/run_scope.h"
#include "engine/loop/divided_loss.h"
#include "engine/memory/records/device_gradients.h"
#include "engine/memory/records/gradient_records.h"
#include "engine/memory/records/state_records.h"
#include "engine/parameters/parameter_groups.h"
#include "engine/step/outer_steps.h"
#include "engine/step/rules/own_optimizer.h"
#include "engine/step/rules/tensor_rule.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/strategy_file.h"
#include "sharding/compress/gradient_method.h"
#include "sharding/partition.h"
#include "tessera/span.h"

namespace tessera {
namespace {

std::shared_ptr<Strategy> with_defaults(const Strategy& given) {
  auto strategy = std::make_shared<Strategy>(as_launched(given));
  fill_in_defaults(strategy->optimizer);
  return strategy;
}

}  // namespace

Engine::Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh,
               const OwnRules& own)
    : state_(std::make_unique<State>(std::move(module), with_defaults(strategy), mesh, own, std::nullopt)) {}

Engine::~Engine() {
  // An exception is passing by: the others must not wait for this rank.
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions_at_start;
  if (unwinding && RunScope::current) {
    const State& s = *state_;
    RunScope::current->memory_story =
        explain_out_of_memory("", s.plan, s.strategy, s.shares_memory, s.activation_bytes);
  }
  MeshGroups& groups = groups_of(state_->mesh);
  const auto kept = [&] { return groups.keep_for_report(state_->whole) && groups.keep_for_report(state_->axes); };
  if (unwinding && !state_->failed && !kept()) {
    state_->fail(make_error(ExitCode::kInternal, "an exception ended the training loop"));
  }
  if (state_->saving && (unwinding || state_->failed)) state_->saving->cancel();
  state_->leave_commit();
  state_->detach_parameters();
}

void Engine::State::expect_backward(const char* what) const {
  expect(!half_loaded, what,
         " after load_checkpoint failed half-way: some parameters are the checkpoint's, others are not. [T0115] hint: "
         "load a "
         "checkpoint that is whole, or make the Engine anew");
  expect(microbatch < strategy.gradient_accumulation, what, " was called ", microbatch + 1,
         " times in a step, but gradient_accumulation is ", strategy.gradient_accumulation,
         ". [T0116] hint: call step() first");
  expect_weights(what);
  expect(open_writes == 0, what, " under ", phrases::kWriteGuard,
         ". [T0117] hint: close that guard first, so that all ranks train the same values");
  expect(!updates_in_backward() || open_guards == 0, what,
         " under Gathered with optimizer.in_backward. [T0118] hint: close that guard first, since backward changes "
         "what it shows");
}

void Engine::State::expect_microbatch(const at::Tensor& loss, const MicrobatchInfo& info) const {
  expect_backward("backward");
  expect(!updates_in_backward() || !info.retain_graph,
         "backward with retain_graph: several losses a microbatch do not go with optimizer.in_backward, which updates "
         "parameters with the gradients of the first. [T0119] hint: add the losses up before one backward, or set "
         "\"optimizer\": {\"in_backward\": false}");
  expect(loss.defined(),
         "backward wants a scalar loss, got an undefined tensor. [T0734] hint: pass the loss that forward "
         "returned");
  expect(loss.numel() == 1, "backward wants a scalar loss, got a tensor of sizes ", loss.sizes(),
         ". [T0120] hint: take .mean() of the losses of a microbatch");
  expect(loss.is_floating_point(), "backward wants a floating loss, got ", loss.scalar_type(),
         ". [T0121] hint: counts and comparisons have no gradients; take a mean of floating values");
  expect(loss.requires_grad(),
         "backward wants a loss that depends on a parameter that trains; this one requires no "
         "gradients. [T0122] hint: compute it outside of ",
         phrases::kNoGrad, ", and do not detach it");
  expect(loss.device() == accelerator.device.device, "backward wants a loss on ", accelerator.device.device,
         ", got one on ", loss.device(), ". [T0123] hint: move the module's inputs there");
  expect_weight(info);
  expect(strategy.lr_schedule.base_batch_size == 0 || info.samples > 0 || info.weight == 0,
         "lr_schedule.base_batch_size needs the number of samples. [T0124] hint: pass ", phrases::kSamples,
         " to backward");
}

void Engine::State::expect_weight(const MicrobatchInfo& info) const {
  expect(std::isfinite(info.weight) && info.weight >= 0,
         "backward wants a weight that is finite and not negative, got ", info.weight,
         ". [T0125] hint: give the number of tokens, pixels or samples that the loss is a mean over");
  expect(microbatch_weight.value_or(info.weight) == info.weight, "backward was told weight ", info.weight,
         ", but an earlier loss of this microbatch (retain_graph) came with weight ", microbatch_weight.value_or(0),
         ". [T0126] hint: give all losses of a microbatch one weight; multiply a loss by a factor of its own");
  expect(info.weight == 1 || strategy.compression.sign != SignForm::kMajority, "backward was told weight ", info.weight,
         ", but under compression.sign \"majority\" each rank has one vote, whatever its loss is a mean over. [T0127] "
         "hint: leave the weight out, or set compression.sign to another form");
}

void Engine::State::expect_weights(const char* what) const {
  expect(!shows_ema, what, " under ", phrases::kAverages,
         ". [T0128] hint: close that guard first, since parameters are averages there");
}

void Engine::State::expect_not_updated(const char* what) const {
  expect(!updates_in_backward() || microbatch == 0, what,
         " between backward and step with optimizer.in_backward: backward has updated parameters already. [T0129] "
         "hint: call step() first");
}

void Engine::State::expect_nothing() const {
  expect_backward("backward_nothing");
  expect(!microbatch_weight,
         "backward_nothing in the middle of a microbatch that has more losses (retain_graph). [T0130] hint: end it "
         "with a backward that says retain_graph false");
  expect(strategy.compression.sign != SignForm::kMajority, "backward_nothing, or ", phrases::kPartialStep,
         ", under compression.sign \"majority\": a rank without a batch has a "
         "vote "
         "all the same. [T0131] hint: give every rank as many batches, or set compression.sign to another form");
  expect(meeting || !rounds.last().empty() || !gathers_with_others(),
         "backward_nothing before this rank's first microbatch under this plan: it does not know yet in which order "
         "ranks gather units. [T0132] hint: loop over uneven(loader, engine) on all ranks, where those with a batch "
         "tell it; or run forward and backward of any batch, with weight 0 if it must not count");
  expect(!(strategy.check.as_across_hosts && plan.input().placement.shared),
         "backward_nothing under check.as_across_hosts: a rank without a batch uses no units, so it cannot be compared "
         "with the others. [T0133] hint: leave the key out, or set host_sharing to false, which makes copies private");
}

void Engine::backward(const at::Tensor& loss, const MicrobatchInfo& info) { tessera::backward(loss, {this}, info); }

void Engine::backward_nothing() {
  state_->expect_nothing();
  state_->or_abort("backward_nothing", [&] { state_->run_nothing(); });
}

/// Once, before the first backward: a loop that was ported may still divide its losses.
void Engine::State::warn_of_division(const at::Tensor& loss) {
  const std::int64_t microbatches = strategy.gradient_accumulation;
  if (std::exchange(has_looked_at_loss, true) || microbatches == 1 || activations || mesh.rank() != 0) return;
  if (!is_divided_by(loss, microbatches)) return;
  log_warning(
      c10::str("backward: the loss was divided by ", microbatches, ", and gradient_accumulation is ", microbatches,
               ". The Engine takes the mean over the microbatches of a step itself, so gradients and the loss that "
               "step tells are 1 / ",
               microbatches,
               " of a plain loop's. [T0134] hint: leave the division out; if it has another reason, nothing is wrong"));
}

/// The gradients of all engines begin with the first one's loss scale; another's own scale is made up for by a factor.
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

/// One backward; what it makes for the parameters of `engines` counts, and nothing else.
void Engine::State::run_backward(const at::Tensor& loss, const std::vector<Engine*>& engines,
                                 const MicrobatchInfo& info) {
  const Span span("backward");
  for (Engine* engine : engines) engine->state_->begin_backward(info.weight);
  const bool counts = info.weight > 0;
  const LossSeed seed = engines[0]->state_->step->seed_of(loss, counts ? info.weight : 1.0);
  const std::vector<at::Tensor> factors = factors_of(engines, seed);
  {
    std::list<GradientHooks::Taking> taking;
    for (std::size_t i = 0; i < engines.size(); ++i)
      taking.emplace_back(*engines[i]->state_->hooks, factors[i], counts);
    torch::autograd::backward({loss}, {seed.seed}, info.retain_graph);
  }
  for (Engine* engine : engines) engine->state_->end_backward(loss, info);
}

void backward(const at::Tensor& loss, const std::vector<Engine*>& engines, const MicrobatchInfo& info) {
  expect(!engines.empty(), phrases::kBackward,
         " wants at least one Engine. [T0135] hint: list those whose modules the loss went through");
  for (auto engine = engines.begin(); engine != engines.end(); ++engine) {
    expect(*engine != nullptr, phrases::kBackward,
           " was given an Engine that is null. [T0136] hint: leave it out of the list, or make it first");
    expect(std::find(engines.begin(), engine, *engine) == engine, phrases::kBackward,
           " was given an Engine twice. [T0137] hint: list each Engine once, whatever the loss does with its module");
    (*engine)->state_->expect_microbatch(loss, info);
  }
  for (Engine* engine : engines) engine->state_->warn_of_division(loss);
  try {
    engines[0]->state_->or_abort("backward", [&] { Engine::State::run_backward(loss, engines, info); });
  } catch (...) {
    for (Engine* engine : engines) engine->state_->fail(groups_of(engines[0]->state_->mesh).status());
    throw;
  }
}

void Engine::State::expect_step(bool is_due, bool partial) const {
  expect(is_due || microbatch > 0, "step wants ", partial ? 1 : strategy.gradient_accumulation,
         partial ? " microbatch or more" : " microbatches",
         " (gradient_accumulation), backward was called 0 times. [T0139] hint: call backward first; a rank without a "
         "batch calls backward_nothing()");
  expect(is_due || partial, "step wants ", strategy.gradient_accumulation,
         " microbatches (gradient_accumulation), backward was called ", microbatch,
         " times. [T0138] hint: where the data end, ", phrases::kPartialStep,
         " makes a step of these, and zero_grad() drops them");
}

bool Engine::step_is_due() const { return state_->microbatch == state_->strategy.gradient_accumulation; }

StepResult Engine::step(bool partial) {
  State& s = *state_;
  s.expect_step(step_is_due(), partial);
  if (!step_is_due()) s.expect_nothing();
  while (!step_is_due()) backward_nothing();
  s.expect_weights("step");
  expect(s.open_guards == 0,
         "step under Gathered. [T0140] hint: close that guard first, since step changes what it shows");
  bool saved = false;
  const StepResult result = s.or_abort("step", [&] {
    StepResult taken = s.take_step();
    // The step to go back from is known before another one begins, though a GPU's host would run ahead.
    if (s.strategy.on_spike.action == SpikeAction::kRollback) taken.wait();
    saved = s.step_finishes_saves && s.save_has_ended();
    return taken;
  });
  if (result.spike && s.strategy.on_spike.action == SpikeAction::kRollback) {
    EngineCheckpoints(*this).go_back(result.step);
    saved = s.step_finishes_saves;  // go_back has waited for it
  }
  if (saved) EngineCheckpoints(*this).finish();  // may throw; the step is taken
  State::follow_sync(state_, s.attempts);
  return result;
}

void Engine::zero_grad() {
  State& s = *state_;
  s.expect_not_updated("zero_grad");
  s.or_abort("zero_grad", [&] {
    // What compression kept of the gradients that are dropped is theirs, too.
    if (s.microbatch > 0 && s.plan.use()[MemoryCategory::kFeedback] > 0) s.reducer->restore_feedback();
    s.drop_microbatches();
    s.step->forget_losses();
  });
}

const Strategy& Engine::strategy() const { return state_->strategy; }
PlannedMemory Engine::plan() const {
  const MemoryPlan& plan = state_->plan;
  return {plan.use(),       plan.disk(),           plan.streamed_bytes(),
          plan.host_step(), plan.uploaded_bytes(), plan.gradient_copies(),
          plan.to_table()};
}
MemoryUse Engine::allocated() const { return state_->allocated(State::When::kNow); }
void Engine::check() const {
  throw_if_error(state_->whole.status());
  throw_if_error(state_->axes.status());
}

Upload Engine::upload(const std::vector<at::Tensor>& host) { return state_->uploader->start(host); }

at::Device Engine::device() const { return state_->accelerator.device.device; }

std::optional<std::int64_t> Engine::activation_bytes() const { return state_->activation_bytes; }

void Engine::set_lr(double lr) { state_->set_lr(nullptr, lr); }
void Engine::set_lr(const std::string& group, double lr) { state_->set_lr(&group, lr); }

double Engine::lr() const { return state_->step->lr(std::nullopt); }
double Engine::lr(const std::string& group) const { return state_->step->lr(state_->index_of_group("lr", group)); }

std::size_t Engine::State::index_of_group(const char* what, const std::string& group) const {
  const std::vector<ParameterGroup>& groups = strategy.optimizer.groups;
  const auto found = std::ranges::find(groups, group, &ParameterGroup::name);
  std::vector<std::string> names;
  for (const ParameterGroup& each : groups) names.push_back(each.name);
  expect(!group.empty(), what,
         " wants the name of a group of optimizer.groups, got an empty one. [T0141] hint: leave the group out to mean "
         "all parameters");
  expect(found != groups.end(), what, ": no group of optimizer.groups is named \"", group, "\"",
         hint_of_names(group, names));
  return static_cast<std::size_t>(found - groups.begin());
}

void Engine::State::set_lr(const std::string* group, double lr) {
  expect(strategy.lr_schedule.type == LrScheduleType::kManual,
         "set_lr: the schedule sets the learning rate. [T0142] hint: set lr_schedule.type to \"manual\"");
  expect(std::isfinite(lr) && lr >= 0 && lr <= 1000, "set_lr wants a rate from 0 to 1000, got ", lr,
         ". [T0143] hint: look where the program computed it; 0 stops updates");
  expect_not_updated("set_lr");
  step->set_lr(lr, group ? std::optional(index_of_group("set_lr", *group)) : std::nullopt);
}

std::int64_t Engine::steps_applied() const { return state_->step->applied(); }

double Engine::loss_scale() const { return state_->step->loss_scale(); }

TrafficCounts Engine::traffic() const {
  TrafficCounts counts;
  if (state_->residency) {
    const ResidencyCounts& gathers = state_->residency->counts();
    counts.gathers = gathers.gathers;
    counts.gathered_bytes = gathers.gathered_bytes;
    counts.gather_seconds = gathers.gather_seconds;
    counts.prefetched_gathers = gathers.prefetched;
    counts.overflow_slots = gathers.overflow_slots;
  }
  const ReducerCounts& reductions = state_->reducer->counts();
  counts.reductions = reductions.reductions;
  counts.reduced_bytes = reductions.reduced_bytes;
  counts.reduction_seconds = reductions.reduction_seconds;
  counts.overflow_buckets = reductions.overflow_buckets;
  if (const OuterSteps* const outer = state_->outer.get()) {
    counts.reductions += outer->sums();
    counts.reduced_bytes += outer->sent_bytes();
  }
  const auto add = [&](const TierCounters& disk) {
    counts.disk_bytes_read += disk.bytes_read;
    counts.disk_bytes_written += disk.bytes_written;
    counts.disk_wait_seconds += disk.wait_seconds;
  };
  const TrainingMemory& memory = state_->memory;
  if (memory.parameter_records) add(memory.parameter_records->counters());
  if (memory.state_records) add(memory.state_records->counters());
  if (memory.tensor_state_records) add(memory.tensor_state_records->counters());
  if (memory.gradient_records) add(memory.gradient_records->counters());
  if (memory.device_gradients) {
    add(memory.device_gradients->counters());
    counts.gradients = memory.device_gradients->copied();
  }
  counts.streamed_bytes = state_->step ? state_->step->streamed_bytes() : 0;
  if (state_->step) counts.host_step = state_->step->host_step();
  if (state_->shards) counts.uploaded_bytes = state_->shards->uploaded_bytes();
  if (state_->activations) {
    const ActivationCounts disk = state_->activations->counts();
    counts.disk_bytes_read += disk.disk_bytes_read;
    counts.disk_bytes_written += disk.disk_bytes_written;
    counts.disk_wait_seconds += disk.disk_wait_seconds;
  }
  return counts;
}

void Engine::enter_forked_process() {
  State& s = *state_;
  s.watch.reset();
  static_cast<void>(s.saving.release());  // its thread, its lock and its files are the parent's
  if (s.durable) s.durable->enter_forked_process();
  static_cast<void>(s.durable.release());
  if (s.activations) s.activations->enter_forked_process();
  if (s.publication) s.publication->give_up();
  if (!s.residency && !s.plan.input().placement.shared) return;  // private memory, which fork has copied
  for (auto& unit : s.units) {
    unit->poison("unit " + unit->name +
                 " is sharded over ranks, and this process was forked from one: it has no part in their collectives. "
                 "[T0144] hint: compute with the model in the training process only");
  }
}

std::vector<std::string> Engine::unit_names() const {
  std::vector<std::string> names;
  for (const auto& unit : state_->units) names.push_back(unit->name);
  return names;
}

MemoryPlan plan_in_detail(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own_rules) {
  expect_comm_hook(strategy.compression, own_rules.comm_hook.get());
  const MeshShape shape = mesh_shape(strategy, topology);
  const MeshPosition position = shape.position_of(topology.rank);
  const auto optimizer = make_optimizer(strategy.optimizer, strategy.ema, own_rules);
  PlanScene scene{planned_position(strategy.sync, position)};
  scene.sync = strategy.sync;
  scene.replicas = shape.replicate;
  scene.shares_memory = would_share_memory(shape, topology, strategy.comm.transport);
  const TransportChoice transport = strategy.comm.transport;
  scene.is_queued = transport == TransportChoice::kNccl || transport == TransportChoice::kCudaHost;
  scene.reduces_in_background = would_reduce_in_background(topology, transport);
  const CompressedParts compressed = would_compress(shape, topology, transport);
  scene.shard_compressed_part = compressed.shard;
  scene.replicate_compressed_part = compressed.replicate;
  if (strategy.sync.makes_outer_steps()) {  // between outer steps a replica is alone
    scene.replicate_compressed_part = 0;
    const bool is_on_a_host = topology.local_world_size % shape.shard == 0;
    scene.reduces_in_background =
        shape.shard > 1 && scene.reduces_in_background && (transport == TransportChoice::kGloo || !is_on_a_host);
  }
  const int parts = parts_for(strategy, position);
  const auto units = partition(module, strategy, parts, nullptr, matrices_of(strategy.optimizer));
  add_tensor_states(units, make_tensor_rule(strategy.optimizer, own_rules).get(), parts);
  assign_groups(units, strategy.optimizer);
  return make_plan(units, strategy, scene, *optimizer);
}

PlannedMemory plan_memory(torch::nn::Module& module, const Strategy& strategy, const Topology& topology,
                          const OwnRules& own) {
  const MemoryPlan plan = plan_in_detail(module, strategy, topology, own);
  return {plan.use(),       plan.disk(),           plan.streamed_bytes(),
          plan.host_step(), plan.uploaded_bytes(), plan.gradient_copies(),
          plan.to_table()};
}

}  // namespace tessera
