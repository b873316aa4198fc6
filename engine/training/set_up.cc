// This file sets up a Training, and destroys it. The work that needs no other rank comes first (look_at_module). The
// next part makes the plan, which is the same on all ranks. The last part (set_up) makes the memory, the values in it,
// and the objects that move gradients and values. The plan gives the size of the memory. All ranks do this work in the
// same order, and wait for each other at each part of it.

#include <torch/nn/modules/embedding.h>

#include <exception>
#include <string>
#include <utility>

#include "engine/activations/saved_activations.h"
#include "engine/autograd/saved_tensor_hooks.h"
#include "engine/device/calls_on_host.h"
#include "engine/device/known_peak.h"
#include "engine/device/pinned_memory.h"
#include "engine/job/plan_scene.h"
#include "engine/memory/expect_reproducible.h"
#include "engine/memory/kept_group.h"
#include "engine/memory/records/device_part_carrier.h"
#include "engine/memory/records/part_carrier.h"
#include "engine/parameters/first_values.h"
#include "engine/parameters/parameter_groups.h"
#include "engine/replay/replay_request.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/cpu_step.h"
#include "engine/step/queued/offloaded_step.h"
#include "engine/step/queued/queued_step.h"
#include "engine/step/rules/own_optimizer.h"
#include "engine/step/rules/tensor_rule.h"
#include "engine/training/training.h"
#include "runtime/base/log.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_file.h"
#include "sharding/partition.h"
#include "sharding/reduce/comm_hook_method.h"
#include "sharding/whole_tensors.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"

namespace tessera {
namespace {

/// Returns whether a destroyed Engine has left fp32 masters of a parameter that it had converted to a narrower dtype.
bool has_kept_master(const at::Tensor& parameter) {
  const auto kept = kept_of(parameter);
  return kept && kept->group.trainable;
}

/// Throws unless all parameters have values that operators may use in training.
void expect_trainable_memory(const std::vector<std::unique_ptr<Unit>>& units) {
  for_each_parameter(units, [](const FlatGroup& group, std::size_t i) {
    const at::Tensor& tensor = group.parameters[i].tensor;
    const std::string who = "parameter " + group.parameters[i].name;
    if (tensor.is_meta() && !is_deferred(tensor)) {
      throw Error(ExitCode::kUsage,
                  who + " is on the meta device and has no values. [T0145] hint: make the module under " +
                      say(phrases::kDeferred) +
                      ", which an Engine fills unit by unit; or call to_empty and give it values "
                      "before the Engine is made");
    }
    if (tensor.is_inference()) {
      throw Error(ExitCode::kUsage,
                  who + " was made under " + say(phrases::kInferenceMode) +
                      ", and such a tensor cannot train. [T0146] hint: make the module outside of it");
    }
  });
}

/// Throws if a parameter belongs to another Engine.
void expect_no_owner(const std::vector<std::unique_ptr<Unit>>& units) {
  for_each_parameter(units, [](const FlatGroup& group, std::size_t i) {
    const FlatParameter& parameter = group.parameters[i];
    const Unit* const owner = unit_of(parameter.tensor);
    if (!owner) return;
    throw Error(ExitCode::kUsage,
                "parameter " + parameter.name + " belongs to another Engine that still lives (its unit " + owner->name +
                    "). [T0147] hint: " + say(phrases::kEndEngine) + "; a module has one Engine at a time");
  });
}

/// Throws for embeddings with max_norm, which rescale rows of their weight while they look them up.
void expect_forward_writes_nothing(const torch::nn::Module& module) {
  for (const auto& item : module.named_modules()) {
    const auto* embedding = item.value()->as<torch::nn::EmbeddingImpl>();
    const auto* bag = item.value()->as<torch::nn::EmbeddingBagImpl>();
    if (!(embedding && embedding->options.max_norm()) && !(bag && bag->options.max_norm())) continue;
    throw Error(ExitCode::kUsage,
                "module " + item.key() +
                    " is an embedding with max_norm, which writes its weight in forward: ranks would write one memory, "
                    "or copies that are thrown away. [T0148] hint: leave max_norm out, and rescale rows under " +
                    say(phrases::kWriteGuard) + " after a step");
  }
}

/// The value of Collectives::compressed_part in the groups that compress a GPU's calls (MeshGroups::on_host).
constexpr int kPartOnHost = 1;

/// The type of the functions sums_on_host and gathers_on_host.
using LeadsOverHost = std::shared_ptr<Collectives> (*)(std::shared_ptr<Collectives>, std::shared_ptr<Collectives>,
                                                       DeviceKernels&, const CallSlots&);

/// Replaces `axis` by a group that makes its compressed calls over the group `on_host`, with pinned memory as large as
/// the plan says. `what` names the content of that memory, for an error.
void lead(std::shared_ptr<Collectives>& axis, const std::shared_ptr<Collectives>& on_host, LeadsOverHost leads,
          const MemoryPlan::SlotsOnHost& slots, const char* what, const Job& job) {
  if (slots.bytes() == 0) return;
  TORCH_INTERNAL_ASSERT(on_host->compressed_part() == kPartOnHost, "calls over the host are planned otherwise");
  DeviceKernels& kernels = *job.accelerator.kernels;
  const auto give =
      pinned_memory_of(kernels, job.mesh.rank(), what, "[T0805] hint: smaller modules in \"units\" need less of it");
  axis = leads(axis, on_host, kernels, {give(static_cast<std::size_t>(slots.bytes())), slots.slots, slots.slot_bytes});
}

/// Lets the hosts of GPUs make the compressed sums of both axes. The pinned memory for this is as large as the plan
/// says. Returns the bytes of that memory. It is collective.
std::int64_t compress_on_host(MeshAxes& axes, const MemoryPlan::SlotsOnHost& shard,
                              const MemoryPlan::SlotsOnHost& replicate, const Job& job) {
  if (shard.bytes() + replicate.bytes() == 0) return 0;
  const HostAxes host = value_or_throw(groups_of(job.mesh).on_host(axes, shard.bytes() > 0, replicate.bytes() > 0));
  constexpr char kWhat[] = "gradients that are compressed";
  lead(axes.reduce, host.reduce, &sums_on_host, shard, kWhat, job);
  lead(axes.replicate, host.replicate, &sums_on_host, replicate, kWhat, job);
  return shard.bytes() + replicate.bytes();
}

/// Makes all-gathers that send values in a form other than plain (WireForm) run on the hosts of GPUs. Such
/// all-gathers have separate groups. Returns the bytes of pinned memory. It is collective.
std::int64_t gather_on_host(MeshAxes& axes, const MemoryPlan& plan, const Job& job) {
  const MemoryPlan::SlotsOnHost shard = plan.gathers_on_host(), replicate = plan.replica_gathers_on_host();
  if (shard.bytes() + replicate.bytes() == 0) return 0;
  // If a replica trains apart, its axes do not show which of the replicas it is.
  const HostAxes host = value_or_throw(groups_of(job.mesh).on_host(job.axes, shard.bytes() > 0, replicate.bytes() > 0));
  constexpr char kWhat[] = "values that are gathered in another form";
  lead(axes.gather, host.reduce, &gathers_on_host, shard, kWhat, job);
  lead(axes.replicate, host.replicate, &gathers_on_host, replicate, kWhat, job);
  return shard.bytes() + replicate.bytes();
}

/// Throws for a layer whose forward is collective. Such a layer would make asynchronous ranks wait for each other in
/// each step. Ranks with different numbers of microbatches would wait for ever.
void expect_forward_meets_nobody(const torch::nn::Module& module, const Strategy& strategy) {
  const bool is_dealt = strategy.deal.by == DealBy::kSpeed;
  if (!is_dealt && !strategy.sync.has_common_parameters()) return;
  for (const auto& item : module.named_modules()) {
    if (!is_norm_of_ranks(*item.value())) continue;
    if (is_dealt)
      throw Error(
          ExitCode::kConfig,
          "/deal/by: speed cannot train module " + item.key() +
              ", a SyncBatchNorm, whose forward waits for all ranks in each microbatch. [T0909] hint: take BatchNorm, "
              "or \"even\"");
    throw Error(ExitCode::kConfig,
                "/sync/type: asynchronous, backups and hogwild cannot train module " + item.key() +
                    ", a SyncBatchNorm, whose forward waits for all ranks. [T0829] hint: take BatchNorm, "
                    "or leave \"sync\" out");
  }
}

UnitKeeper::OnFailure failing(Job& job) {
  return [&job](const Error& error) { job.fail(make_error(error.exit_code(), error.message())); };
}

}  // namespace

Training::Training(Job& job_given, std::int64_t steps) : job(job_given), sync(job_given.strategy, steps) {
  job.memory_story = [this](const std::string& what) {
    return explain_out_of_memory(what, plan, job.strategy, shares_memory(), footprint.activation_bytes);
  };
}

Training::~Training() = default;

/// Does everything that needs no other rank. If it throws, it has changed nothing: another Engine over the module still
/// works.
void Training::look_at_module() {
  const Strategy& strategy = job.strategy;
  throw_if_error(check_strategy(strategy));
  expect_forward_writes_nothing(*job.module);
  expect_running_statistics(strategy, *job.module);
  expect_forward_meets_nobody(*job.module, strategy);
  expect_comm_hook(strategy.compression, job.own_rules.comm_hook.get());
  optimizer = make_optimizer(strategy.optimizer, strategy.ema, job.own_rules);
  const int parts = parts_for(strategy, job.shape_of_mesh().position_of(job.mesh.rank()));
  units = partition(*job.module, strategy, parts, &has_kept_master, matrices_of(strategy.optimizer));
  add_tensor_states(units, make_tensor_rule(strategy.optimizer, job.own_rules).get(), parts);
  assign_groups(units, strategy.optimizer);
  expect_trainable_memory(units);
  expect_no_owner(units);
  expect_own_memory(units, whole_tensors(*job.module, strategy.units));
}

bool Training::shares_memory() const {
  return axes.gather && !job.accelerator.device.is_queued && axes.gather->shares_memory();
}

void Training::make_plan(bool continues) {
  const Strategy& strategy = job.strategy;
  const Topology& topology = job.mesh.topology();
  expect_pairwise_transport(strategy, axes, topology);
  const bool is_queued = job.accelerator.device.is_queued;
  if (is_queued) expect_no_replay();
  const bool compresses_on_host =
      is_queued && (compresses(strategy.compression) || strategy.compression.gathers != WireForm::kPlain);
  const auto compressed_part = [&](const Collectives& group) {
    return compresses_on_host && group.size() > 1 ? kPartOnHost : group.compressed_part();
  };
  GroupAbilities abilities{shares_memory(), is_queued};
  abilities.shard_reduces_in_background = axes.reduce->reduces_in_background();
  abilities.reduces_in_background = abilities.shard_reduces_in_background || axes.replicate->reduces_in_background();
  abilities.shard_compressed_part = compressed_part(*axes.reduce);
  abilities.replicate_compressed_part = compressed_part(*axes.replicate);
  PlanScene scene = plan_scene(sync.config(), job.position, topology, abilities);
  scene.statistics_numel = MicrobatchStatistics::numel_of(*job.module, strategy);
  scene.offloaded_step = choose_offloaded_step(units, strategy, scene, *optimizer, job.accelerator, *job.axes.control);
  plan = tessera::make_plan(units, strategy, scene, *optimizer);
  if (job.mesh.rank() == 0) report_plan(continues);
  check_memory_limit(plan, strategy, scene.shares_memory);
  if (!sync.comes_later()) return;
  PlanScene later = plan_scene(strategy.sync, job.position, topology, abilities);  // scene of the plan at start_step
  later.offloaded_step = scene.offloaded_step;
  check_memory_limit(tessera::make_plan(units, strategy, later, *optimizer), strategy, later.shares_memory);
}

void Training::set_up(DurableFiles* durable, bool continues) {
  const Strategy& strategy = job.strategy;
  const ComputeDevice device = job.accelerator.device;
  const NamedTensors whole = whole_tensors(*job.module, strategy.units);
  // This object is made before memory is allocated. If modules differ, ranks then learn which parameter differs, and
  // not only that a size differs.
  FirstValues first_values(units, *job.axes.control);
  if (plan.has_secondary())
    axes.secondary = value_or_throw(groups_of(job.mesh).secondary(axes, plan.placement().secondary.ranks));
  memory = TrainingMemory::allocate(plan, units, axes, job.accelerator, strategy.offload.paths, durable);
  MemoryUse& use = footprint.allocated = memory.allocated();
  if (durable)
    use[device.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kRecords] += durable->memory_bytes();
  for (auto& unit : units) first_values.load(*unit);
  // Waits until all parts are written, before any part is read.
  if (plan.placement().shared) throw_if_error(axes.gather->barrier("parameters").wait());
  if (!continues) load_whole_tensors(whole, *job.axes.control, device.device);
  values.loaded = true;
  set_up_gradients();
  set_up_gathering();
  activations = offload_activations(strategy.offload, whole, job.accelerator, job.mesh.rank());
  if (activations)
    use[device.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kActivations] += activations->memory_bytes();
  // The allocation must equal the plan to the byte.
  TORCH_INTERNAL_ASSERT(use == plan.use(), "the allocation departs from the plan");
  values.checks->accept();
  if (job.accelerator.allocated) footprint.at_start = job.accelerator.allocated().now;
  if (job.accelerator.forget_peak) job.accelerator.forget_peak();
  agree_on_seed();
  times.last_end = std::chrono::steady_clock::now();
  times.brought = data_seconds_of_this_thread();
  times.peak_tflops = known_peak_tflops(job.accelerator.name, strategy.mixed_precision.param);
  times.flops.emplace();
  times.data.begin(times.last_end);
}

/// Makes the objects that receive gradients, and the step that uses the gradients.
void Training::set_up_gradients() {
  const Strategy& strategy = job.strategy;
  ComputeDevice device = job.accelerator.device;
  const bool is_common = sync.config().has_common_parameters();
  if (is_common) device.waits = nullptr;  // such steps measure their own waits
  if (!device.is_queued || is_common) gradients.norm.emplace(units);
  footprint.allocated[MemoryCategory::kHostRecords] += gather_on_host(axes, plan, job);
  footprint.allocated[MemoryCategory::kHostRecords] +=
      compress_on_host(axes, plan.shard_sums_on_host(), plan.replicate_sums_on_host(), job);
  Reducer::Memory gradient_memory{std::move(memory.buckets), std::move(memory.scratch), {}, std::move(memory.feedback)};
  gradient_memory.sums_below = memory.gradient_carrier();
  if (updates_in_backward()) gradient_memory.sums = std::move(memory.gradients);
  gradients.reducer.emplace(plan, pointers_to(units), axes, std::move(gradient_memory), device,
                            device.is_queued ? nullptr : &*gradients.norm);
  if (strategy.noise_scale.every > 0 && !device.is_queued) gradients.reducer->keep_own_squares();
  if (job.own_rules.comm_hook) gradients.reducer->sum_by(job.own_rules.comm_hook);
  values.checks.emplace(units, strategy.check.values, device.device);
  gradients.hooks.emplace(units, *gradients.reducer);
  if (plan.publishes_behind(axes.gather->gathers_in_background()))
    gathering.publication.emplace(pointers_to(units), *axes.gather, plan.wire().gathers, failing(job));
  if (plan.wire().statistics_numel > 0) {
    window.statistics.emplace(*job.module, plan.order(), job.axes.control);
    footprint.allocated[device.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kStaging] +=
        plan.statistics_bytes();
  }
  if (plan.wire().longest_run > 0) dealer.emplace(strategy, plan.placement().mesh.world_size());
  if (plan.wire().backups > 0) {
    const std::chrono::milliseconds limit(static_cast<std::int64_t>(1000 * strategy.comm.timeout_s));
    MeshGroups& groups = groups_of(job.mesh);
    claims.emplace(job.axes.control, dealer->order(), BackupClaims::Store{groups.store(), groups.watch(), limit});
  }
  MeshAxes whole = job.axes;
  footprint.allocated[MemoryCategory::kHostRecords] += compress_on_host(whole, {}, plan.outer_sums_on_host(), job);
  sync.begin(units, plan, axes, whole, job.accelerator, footprint.allocated);
  make_step();
  if (plan.passes().steps_on_host || (device.is_queued && (plan.gradients_below() || is_common)) ||
      sync.config().has_servers())
    gradients.reducer->on_reduced([this](const Unit& unit) { step->reduced(unit); });
  if (updates_in_backward()) {
    gradients.reducer->on_summed([this](Unit& unit, const UnitAgreement& agreed) {
      step->update(unit, agreed);
      unit.gathered_hash = 0;  // values of a unit that is gathered in place have changed
      if (job.strategy.check.values) values.checks->accept(unit);
    });
    if (memory.records.states || memory.records.parameters)
      gradients.reducer->on_gradient([this] { step->read_ahead(); });
  }
  gradients.reducer->tell(window.rounds);
}

void Training::set_up_gathering() {
  const ComputeDevice device = job.accelerator.device;
  auto& [log, publication, parts, residency, watch] = gathering;
  log.emplace(static_cast<std::size_t>(plan.placement().prefetch) + 1);
  if (plan.gathers()) {
    if (memory.records.parameters && device.is_queued) {
      parts = std::make_unique<DevicePartCarrier>(plan, units, memory.records.parameters, *job.accelerator.kernels,
                                                  job.mesh.rank());
    } else if (memory.records.parameters) {
      parts = std::make_unique<PartCarrier>(units, memory.records.parameters);
    }
    if (parts) footprint.allocated[MemoryCategory::kHostRecords] += parts->pinned_bytes();
    std::unique_ptr<SecondaryShards> copy;
    if (plan.has_secondary())
      copy = std::make_unique<SecondaryShards>(
          plan, pointers_to(units), *axes.secondary,
          SecondaryShards::Memory{std::move(memory.secondary), std::move(memory.secondary_codes)});
    residency.emplace(plan, pointers_to(units), *axes.gather,
                      SlotMemory{std::move(memory.slots), device, parts.get(), std::move(copy)}, *log, failing(job));
    residency->tell(window.rounds);
    if (job.strategy.check.values) residency->check_values();
    put_engine_in_place();  // hooks of the program that save tensors get no pointers into slots
    watch.emplace();
  } else if (publication) {
    watch.emplace();
  } else if (job.strategy.check.as_across_hosts && plan.placement().shared) {
    for (auto& unit : units) unit->use_log = &*log;
    watch.emplace();
  } else if (sync.pulls(
                 units, [this](Unit& unit) { values.checks->accept(unit); }, failing(job))) {
    watch.emplace();
  }
}

void Training::make_step() {
  const int first_rank = job.mesh.rank() - axes.world->rank();
  const StepContext context{units,
                            job.strategy,
                            plan,
                            axes,
                            memory,
                            job.own_rules,
                            *gradients.reducer,
                            gathering.publication ? &*gathering.publication : nullptr,
                            first_rank,
                            job.mesh.world_size() / axes.world->size()};
  if (sync.config().has_common_parameters()) {
    step = sync.make_step(context, *gradients.norm);
  } else if (job.accelerator.device.is_queued) {
    step = std::make_unique<QueuedStep>(context, *optimizer, job.accelerator);
  } else {
    step = std::make_unique<CpuStep>(context, *gradients.norm);
  }
  if (GradientSquares* const squares = step->own_squares()) gradients.reducer->square_by(*squares);
  if (dealer) step->deal(dealer->order());
}

bool Training::use_defaults(std::int64_t version) {
  OptimizerConfig& numbers = job.given_strategy->optimizer;
  if (version == numbers.defaults_version) return false;
  numbers.defaults_version = version;
  const std::vector<ChangedDefault> changed = changed_defaults(numbers);
  if (changed.empty()) return false;
  fill_in_defaults(numbers);
  step.reset();
  optimizer = make_optimizer(numbers, job.strategy.ema, job.own_rules);
  make_step();
  if (job.mesh.rank() != 0) return true;
  std::string text;
  for (const ChangedDefault& each : changed)
    text += (text.empty() ? "" : ", ") + each.key + " " + (version == 1 ? each.before : each.now);
  log_info("the run began with another version's defaults, and what the strategy leaves out keeps them: " + text +
           ". [T0151] hint: write these keys into the strategy");
  return true;
}

void Training::report_frozen_states() const {
  if (!frozen_states.empty() && job.mesh.rank() == 0) log_info(frozen_states.describe());
}

void Training::take_newest_values() {
  try {
    sync.take_newest();
  } catch (const Error& error) {
    log_warning("parameters keep the values that this rank pulled last: " + error.message());
  } catch (const std::exception& error) {  // a GPU that has failed
    log_warning(std::string("parameters keep the values that this rank pulled last: ") + error.what());
  }
}

void Training::detach_parameters() {
  activations.reset();
  gradients.hooks.reset();
  gathering.watch.reset();
  gathering.residency.reset();
  gathering.publication.reset();
  sync.stop_pulls();
  for (auto& unit : units) unit->reopen();
  const bool several = plan.placement().mesh.shard_size > 1 || plan.parameters_below();
  const bool sharded = placement_of(job.strategy).parameters.shard && several;
  if (!values.loaded) {
    for (auto& unit : units) unit->poison("unit " + unit->name + " was being set up by an Engine that failed");
    return;
  }
  // If a GPU trains, `axes.gather` may use pinned memory (gather_on_host) that is freed with the Engine.
  const std::shared_ptr<Collectives>& transport = job.accelerator.device.is_queued ? job.axes.gather : axes.gather;
  for (auto& unit : units) {
    for (auto& group : unit->groups) keep(*group, plan, job.position, memory, transport, /*is_readable=*/!sharded);
  }
}

}  // namespace tessera
