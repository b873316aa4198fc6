#include "engine/engine_state.h"

#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "engine/activations/offload_activations.h"
#include "engine/job/last_words.h"
#include "engine/job/mesh_shape.h"
#include "engine/job/same_start.h"
#include "engine/memory/kept_group.h"
#include "engine/memory/records/device_shards.h"
#include "engine/memory/records/gradient_records.h"
#include "engine/memory/records/shard_records.h"
#include "engine/memory/tensor_heap.h"
#include "engine/open_durable.h"
#include "engine/parameters/first_values.h"
#include "engine/parameters/parameter_groups.h"
#include "engine/parameters/replicas.h"
#include "engine/step/agree/gather_order.h"
#include "engine/step/agree/step_context.h"
#include "engine/step/cpu_step.h"
#include "engine/step/outer_steps.h"
#include "engine/step/queued/offloaded_step.h"
#include "engine/step/queued/queued_step.h"
#include "engine/step/rules/own_optimizer.h"
#include "engine/step/rules/tensor_rule.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/text.h"
#include "runtime/border/expect.h"
#include "runtime/border/phrase.h"
#include "runtime/border/throw.h"
#include "runtime/comm/mesh_groups.h"
#include "runtime/config/optimizer_defaults.h"
#include "runtime/config/strategy_file.h"
#include "runtime/config/strategy_names.h"
#include "sharding/partition.h"
#include "sharding/whole_tensors.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"
#include "tessera/span.h"
#include "tessera/sync_buffers.h"

namespace tessera {
namespace {

/// Whether an Engine that is gone left fp32 values of a parameter that it had made narrow.
bool has_kept_master(const at::Tensor& parameter) {
  const auto kept = kept_of(parameter);
  return kept && kept->group.trainable;
}

/// A parameter has values, and operators that train may use it.
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

/// A parameter belongs to one Engine at a time.
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

/// Embeddings with max_norm rescale rows of their weight while they look them up.
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

/// For the line about gradients on the wire.
std::string words_of_compression(const PlanInput& input) {
  if (input.compression.hook) return input.mesh.world_size() > 1 ? " (summed by the program's CommHook)" : "";
  const bool shard = input.compressed_shard_part > 0, replicate = input.compressed_replicate_part > 0;
  if (!shard && !replicate) return "";
  const CompressionConfig& compression = input.compression;
  if (compression.power_sgd_rank > 0)
    return c10::str(" (over the network matrices as factors of rank ", compression.power_sgd_rank, ")");
  if (compression.top_k > 0)
    return c10::str(" (over the network ", 100 * compression.top_k, " % of each unit's, the largest)");
  if (compression.random_k > 0)
    return c10::str(" (over the network ", 100 * compression.random_k, " % of each unit's, at random)");
  if (compression.sign != SignForm::kNone)
    return c10::str(" (over the network signs, ",
                    compression.sign == SignForm::kMajority ? "by majority vote)" : "with error feedback)");
  if (compression.one_bit) {
    return std::string(" (over the network one bit each") + (compression.one_bit_momentum > 0 ? " of momentum" : "") +
           ", contributions and sums, with error feedback)";
  }
  if (compression.terngrad) return " (over the network as -1, 0 or 1 times the largest of 256)";
  if (compression.qsgd_levels > 0)
    return c10::str(" (over the network as ", compression.qsgd_levels, " levels of the norm of 256)");
  const char* const axes = !replicate ? "the shard axis" : !shard ? "the replicate axis" : "both axes";
  return c10::str(" (over the network on ", axes, ": ", name_of(input.compression.gradients), ", sums ",
                  name_of(input.compression.sums), input.compression.error_feedback ? ", with error feedback)" : ")");
}

/// For the line about parameters' types.
std::string words_of_gathers(const PlanInput& input) {
  const WireForm form = input.gathers != WireForm::kPlain ? input.gathers : input.replica_gathers;
  return form == WireForm::kPlain ? "" : " (over the network " + name_of(form) + ")";
}

/// Where units are updated in backward and their records are more than are read ahead: what would hide them. Empty otherwise.
std::string hint_of_queue_depth(const MemoryPlan& plan) {
  const bool gives_way = plan.input().is_queued && plan.parameters_below();  // as MemoryPlan::queue_depth
  if (!plan.input().updates_in_backward || gives_way) return "";
  const std::int64_t depth = plan.queue_depth();
  const std::int64_t records = plan.most_records_of_a_unit(), wanted = std::min(records, kMostQueueDepth);
  if (wanted <= depth) return "";
  PlanInput input = plan.input();
  input.offload.queue_depth = wanted;
  const MemoryPlan deeper(std::move(input));
  return c10::str("\"offload.queue_depth\" is ", depth, ", and the update of a unit moves up to ", records,
                  " records: backward waits for those beyond it. [T0149] hint: raise it; ", wanted, " takes ",
                  format_bytes(deeper.use().total() - plan.use().total()), " more");
}

/// Empty where the strategy says all numbers whose defaults another version had otherwise.
std::string words_of_changed_defaults(const OptimizerConfig& optimizer) {
  std::string text;
  for (const ChangedDefault& each : changed_defaults(optimizer))
    text += (text.empty() ? "" : "; ") + each.key + " is " + each.now + ", and was " + each.before;
  if (text.empty()) return "";
  return "the strategy leaves out what has another default for " + name_of(optimizer.type) +
         " since Tessera 0.2 (docs/strategy.md says whose): " + text +
         ". [T0150] hint: write the keys into the strategy";
}

/// What "comm.transport" asks of a mesh.
struct WantedTransport {
  const char* name;
  TransportKind kind;
  bool on_gpu;
};

WantedTransport wanted_transport(TransportChoice choice) {
  switch (choice) {
    case TransportChoice::kHost:
      return {"host", TransportKind::kHost, false};
    case TransportChoice::kGloo:
      return {"gloo", TransportKind::kGloo, false};
    case TransportChoice::kNccl:
      return {"nccl", TransportKind::kNccl, true};
    case TransportChoice::kCudaHost:
      return {"cuda_host", TransportKind::kCudaHost, true};
    case TransportChoice::kAuto:
      break;  // asks nothing
  }
  TORCH_INTERNAL_ASSERT(false, "no transport was asked for");
}

/// c10::Error puts its stack below the first line.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

Engine::State::~State() = default;

Engine::State::State(std::shared_ptr<torch::nn::Module> module_given, std::shared_ptr<Strategy> strategy_given,
                     const Mesh& mesh_given, OwnRules own_rules_given, std::optional<std::int64_t> continues_after)
    : module(std::move(module_given)),
      given_strategy(std::move(strategy_given)),
      strategy(*given_strategy),
      sync(strategy.sync.after(continues_after.value_or(0))),
      continues(continues_after.has_value()),
      mesh(mesh_given),
      own_rules(std::move(own_rules_given)) {
  look_at_module();
  try {
    or_abort("Engine", [&] { set_up(); });
  } catch (...) {
    detach_parameters();
    throw;
  }
}

/// What needs no other rank. Where it throws, nothing has happened: another Engine over the module goes on.
void Engine::State::look_at_module() {
  throw_if_error(check_strategy(strategy));
  expect_forward_writes_nothing(*module);
  expect_comm_hook(strategy.compression, own_rules.comm_hook.get());
  optimizer = make_optimizer(strategy.optimizer, strategy.ema, own_rules);
  const int parts = parts_for(strategy, shape_of_mesh().position_of(mesh.rank()));
  units = partition(*module, strategy, parts, &has_kept_master, matrices_of(strategy.optimizer));
  add_tensor_states(units, make_tensor_rule(strategy.optimizer, own_rules).get(), parts);
  assign_groups(units, strategy.optimizer);
  expect_trainable_memory(units);
  expect_no_owner(units);
  expect_own_memory(units, whole_tensors(*module, strategy.units));
}

MeshShape Engine::State::shape_of_mesh() const { return mesh_shape(strategy, mesh.topology()); }

void Engine::State::set_up() {
  if (strategy.memory.tensor_heap) install_tensor_heap();
  const MeshShape shape = shape_of_mesh();
  position = shape.position_of(mesh.rank());
  whole = value_or_throw(groups_of(mesh).axes(shape.replicate, shape.shard));
  check_transport();
  expect_same_start(strategy, *whole.control);
  axes = !sync.makes_outer_steps() ? whole : value_or_throw(groups_of(mesh).within_replica(whole));
  accelerator = accelerator_of(*whole.world);
  const ComputeDevice device = accelerator.device;
  uploader.emplace(device, accelerator.kernels.get());
  if (strategy.checkpoint.async) save_group = value_or_throw(groups_of(mesh).world("checkpoint"));
  shares_memory = !device.is_queued && axes.gather->shares_memory();
  const bool in_background = axes.reduce->reduces_in_background() || axes.replicate->reduces_in_background();
  PlanScene scene{
      planned_position(sync, position),  shares_memory, device.is_queued, in_background, axes.reduce->compressed_part(),
      axes.replicate->compressed_part(), sync,          shape.replicate};
  scene.offloaded_step = choose_offloaded_step(units, strategy, scene, *optimizer, accelerator, *whole.control);
  plan = make_plan(units, strategy, scene, *optimizer);
  if (mesh.rank() == 0) report_plan();
  check_memory_limit(plan, strategy, shares_memory);
  if (strategy.sync.makes_outer_steps() && !sync.makes_outer_steps()) {  // what the Engine will plan at start_step
    PlanScene later = scene;
    later.mesh = planned_position(strategy.sync, position);
    later.reduces_in_background = axes.reduce->reduces_in_background();
    later.replicate_compressed_part = 0;
    later.sync = strategy.sync;
    check_memory_limit(make_plan(units, strategy, later, *optimizer), strategy, shares_memory);
  }

  if (strategy.durable.every > 0) {
    durable = open_durable(strategy.durable, plan, durable_layout(plan, units, *module, strategy), *axes.control);
  }
  // Before memory: ranks whose modules differ are told which parameter, not which size.
  FirstValues first_values(units, *whole.control);
  memory = TrainingMemory::allocate(plan, units, axes, accelerator, strategy.offload.paths, durable.get());
  memory_use = memory.allocated();
  const MemoryCategory host_records = device.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kRecords;
  if (durable) memory_use[host_records] += durable->memory_bytes();
  for (auto& unit : units) first_values.load(*unit);
  // All parts are written before any is read.
  if (plan.input().placement.shared) throw_if_error(axes.gather->barrier("parameters").wait());
  if (!continues) load_whole_tensors(whole_tensors(*module, strategy.units), *whole.control, device.device);
  loaded = true;
  if (!device.is_queued) norm.emplace(units);
  Reducer::Memory gradient_memory{std::move(memory.buckets), std::move(memory.scratch), {}, std::move(memory.feedback)};
  gradient_memory.store = memory.gradient_store();
  if (updates_in_backward()) gradient_memory.sums = std::move(memory.gradients);
  reducer.emplace(plan, pointers_to(units), axes, std::move(gradient_memory), device, norm ? &*norm : nullptr);
  if (own_rules.comm_hook) reducer->sum_by(own_rules.comm_hook);
  checks.emplace(units, strategy.check.values && !device.is_queued);
  hooks.emplace(units, *reducer);
  const auto on_failure = [this](const Error& error) { fail(make_error(error.exit_code(), error.message())); };
  if (plan.publishes_behind(axes.gather->gathers_in_background()))
    publication.emplace(pointers_to(units), *axes.gather, plan.input().gathers, on_failure);
  make_step();
  if (plan.steps_on_host() || (device.is_queued && plan.gradients_below()))
    reducer->on_reduced([this](const Unit& unit) { step->reduced(unit); });
  if (sync.makes_outer_steps()) {
    outer = std::make_unique<OuterSteps>(units, plan, axes, whole.replicate);
    memory_use[MemoryCategory::kOptimizer] += outer->memory_bytes();
    memory_use[MemoryCategory::kStaging] += outer->scratch_bytes();
  }
  if (updates_in_backward()) {
    reducer->on_summed([this](Unit& unit, const UnitAgreement& agreed) {
      step->update(unit, agreed);
      unit.gathered_hash = 0;  // where it is gathered in place, its values have changed
      if (strategy.check.values) checks->accept(unit);
    });
    if (memory.state_records || memory.parameter_records) reducer->on_gradient([this] { step->read_ahead(); });
  }
  reducer->tell(rounds);
  log.emplace(static_cast<std::size_t>(plan.input().prefetch) + 1);
  if (plan.gathers()) {
    if (memory.parameter_records && device.is_queued) {
      shards = std::make_unique<DeviceShards>(plan, units, memory.parameter_records, *accelerator.kernels, mesh.rank());
    } else if (memory.parameter_records) {
      shards = std::make_unique<ShardRecords>(memory.parameter_records);
    }
    if (shards) memory_use[MemoryCategory::kHostRecords] += shards->pinned_bytes();
    residency.emplace(plan, pointers_to(units), *axes.gather, std::move(memory.slots), device, *log, on_failure,
                      shards.get());
    residency->tell(rounds);
    if (strategy.check.values && !device.is_queued) residency->check_values();
    watch.emplace();
  } else if (publication) {
    watch.emplace();
  } else if (strategy.check.as_across_hosts && plan.input().placement.shared) {
    for (auto& unit : units) unit->use_log = &*log;
    watch.emplace();
  }
  activations = offload_activations(strategy.offload, whole_tensors(*module, strategy.units), accelerator, mesh.rank());
  if (activations) {
    memory_use[device.is_queued ? MemoryCategory::kHostRecords : MemoryCategory::kActivations] +=
        activations->memory_bytes();
  }
  expect_plan();
  checks->accept();
  if (accelerator.allocated) allocated_at_start = accelerator.allocated().now;
  if (accelerator.forget_peak) accelerator.forget_peak();
  last_step_end = std::chrono::steady_clock::now();
}

void Engine::State::make_step() {
  const StepContext context{units,  strategy,  plan,     axes,
                            memory, own_rules, *reducer, publication ? &*publication : nullptr};
  if (accelerator.device.is_queued) {
    step = std::make_unique<QueuedStep>(context, *optimizer, accelerator);
  } else {
    step = std::make_unique<CpuStep>(context, *norm);
  }
}

bool Engine::State::use_defaults(std::int64_t version) {
  OptimizerConfig& numbers = given_strategy->optimizer;
  if (version == numbers.defaults_version) return false;
  numbers.defaults_version = version;
  const std::vector<ChangedDefault> changed = changed_defaults(numbers);
  if (changed.empty()) return false;
  fill_in_defaults(numbers);
  step.reset();
  optimizer = make_optimizer(numbers, strategy.ema, own_rules);
  make_step();
  if (mesh.rank() != 0) return true;
  std::string text;
  for (const ChangedDefault& each : changed)
    text += (text.empty() ? "" : ", ") + each.key + " " + (version == 1 ? each.before : each.now);
  log_info("the run began with another version's defaults, and what the strategy leaves out keeps them: " + text +
           ". [T0151] hint: write these keys into the strategy");
  return true;
}

/// The mesh was made before the Engine saw the strategy; what the file says of transports must have reached it.
void Engine::State::check_transport() const {
  if (strategy.comm.transport == TransportChoice::kAuto) return;
  const WantedTransport wanted = wanted_transport(strategy.comm.transport);
  // A rank alone has no transport, but it has a device.
  const bool right_device = wanted.on_gpu == (whole.world->gpu() != Collectives::kHostMemory);
  const bool right_transport = mesh.world_size() == 1 || whole.world->kind() == wanted.kind;
  if (right_device && right_transport) return;
  throw Error(ExitCode::kConfig, std::string("/comm/transport is \"") + wanted.name +
                                     "\", but the mesh was made with " + whole.world->transport() +
                                     ". [T0152] hint: call " + say(phrases::kInit));
}

namespace {

/// A program's output is its own: the whole plan is said to whoever asked for it.
bool wants_table_of_plan() {
  const char* const wish = std::getenv("TESSERA_PLAN");
  const std::string said = wish == nullptr ? "" : wish;
  if (!said.empty() && said != "table" && said != "line")
    log_warning("TESSERA_PLAN: " + quoted_text(said) + " is neither \"line\", the default, nor \"table\"" +
                did_you_mean(said, {"line", "table"}));
  return said == "table";
}

}  // namespace

void Engine::State::report_plan() const {
  std::ostringstream text;
  text << "plan of " << name_of(strategy.strategy) << ", mesh " << plan.input().mesh.replicate_size << " x "
       << plan.input().mesh.shard_size << ", " << units.size() << " units, parameters "
       << name_of(strategy.mixed_precision.param) << words_of_gathers(plan.input()) << ", gradients on the wire "
       << name_of(strategy.mixed_precision.reduce) << words_of_compression(plan.input()) << ", optimizer state "
       << name_of(strategy.optimizer.state_dtype)
       << (plan.input().placement.shared ? ", one copy of the parameters for the ranks of a host" : "");
  if (wants_table_of_plan()) {
    text << "\n" << plan.to_table();
    if (const std::string groups = table_of_groups(units, strategy.optimizer); !groups.empty()) text << "\n" << groups;
  } else {
    text << ": " << format_bytes(plan.use().total()) << " a rank beside activations (TESSERA_PLAN=table shows of what)";
  }
  log_info(text.str());
  const PlanInput& input = plan.input();
  if (input.outer.makes_outer_steps() && input.replicas == 1) {
    log_warning(
        "\"sync\" has one replica, with which no other meets. [T0153] hint: \"mesh\": {\"replicate\": ...} says how "
        "many there are");
  }
  if (strategy.offload.gradients != input.offload.gradients) {
    log_warning(
        "\"offload.gradients\" has no effect here: no unit but the root trains, whose sums stay in memory. [T0154] "
        "hint: name classes in \"units\"");
  }
  const bool compresses_outer = input.outer.makes_outer_steps() && whole.replicate->compressed_part() > 0;
  if (compresses(strategy.compression) && !compresses_outer && !strategy.compression.hook &&
      words_of_compression(plan.input()).empty()) {
    log_info(
        "\"compression\" has no effect here: on the axes that it names no gradients go over a network, as the ranks "
        "share "
        "memory");
  }
  if (strategy.compression.gathers != WireForm::kPlain && words_of_gathers(input).empty())
    log_info("\"compression.gathers\" has no effect here: it changes nothing that goes over a network");
  if (const std::string hint = hint_of_queue_depth(plan); !hint.empty()) log_info(hint);
  if (const std::string text = words_of_changed_defaults(strategy.optimizer); !continues && !text.empty())
    log_warning(text);
  if (units.size() == 1 && plan.use()[MemoryCategory::kSlots] > 0) {
    log_warning("the whole module is one unit, so it is gathered at once. [T0155] hint: name classes in \"units\"");
  }
}

void Engine::State::expect_plan() const {
  TORCH_INTERNAL_ASSERT(memory_use == plan.use(), "the allocation departs from the plan");
}

MemoryUse Engine::State::allocated(When when) const {
  const bool now = when == When::kNow;
  MemoryUse use = memory_use;
  if (residency) {
    const ResidencyCounts& gathers = residency->counts();
    use[MemoryCategory::kSlots] += now ? gathers.overflow_bytes : gathers.overflow_peak;
  }
  const ReducerCounts& reductions = reducer->counts();
  use[MemoryCategory::kBuckets] += now ? reductions.overflow_bytes : reductions.overflow_peak;
  return use;
}

void Engine::State::fail(const absl::Status& reason) {
  failed = true;
  groups_of(mesh).abort(reason);
}

void Engine::State::rethrow(const char* what) {
  try {
    throw;
  } catch (const Error& error) {
    fail(make_error(error.exit_code(), error.message()));
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = explain_out_of_memory(std::string(what) + ": " + first_line(error.what()), plan, strategy,
                                                   shares_memory, activation_bytes);
    fail(make_error(ExitCode::kOsResource, text));
    throw Error(ExitCode::kOsResource, text);
  } catch (const std::exception&) {
    const bool known = failed;
    const absl::Status status = status_of(std::current_exception());
    fail(make_error(exit_code_of(status), std::string(what) + ": " + message_of(status)));
    if (known) throw error_of(groups_of(mesh).status());
    throw;
  }
}

/// Parameters that were gathered refuse access from now on, and their shards wait for the next Engine. Others stay
/// readable: with their memory, or as a copy of their own if ranks shared it.
void Engine::State::detach_parameters() {
  activations.reset();
  hooks.reset();
  watch.reset();
  residency.reset();
  publication.reset();
  for (auto& unit : units) unit->reopen();
  const bool several = plan.input().mesh.shard_size > 1 || plan.parameters_below();
  const bool sharded = placement_of(strategy.strategy, false).parameters.shard && several;
  if (!loaded) {
    for (auto& unit : units) unit->poison("unit " + unit->name + " was being set up by an Engine that failed");
    return;
  }
  for (auto& unit : units) {
    for (auto& group : unit->groups) keep(*group, plan, position, memory, axes.gather, /*is_readable=*/!sharded);
  }
}

void Engine::State::begin_backward(double weight) {
  const Span span("checks");
  rounds.announce(RoundLog::kBackward);
  if (use_times) use_times->mark(UseTimes::Event::kBackward);
  if (activations) hook_saved_tensors(activations);  // a program may train on another thread than it made the Engine on
  expect_parameters();
  hooks->follow();
  if (microbatch > 0) hooks->expect_untouched();
  const std::int64_t plain_steps = strategy.compression.start_step;
  reducer->use_methods(plain_steps == 0 || step->applied() >= plain_steps, attempts + 1);
  if (updates_in_backward() || kept_gradient_bytes(plan) > 0) settle_commit();  // of what backward changes
  if (updates_in_backward()) {
    reducer->begin_round(digest_of_gathers(log->entries()), weight);
  }
  if (microbatch + 1 == strategy.gradient_accumulation) step->expect_update(reducer->order());
  rounds.add(RoundLog::kBackward);
}

void Engine::State::end_round(bool ends, bool has_batch) {
  rounds.announce(ends ? RoundLog::kEnd : RoundLog::kEndOfLoss);
  const bool last = ends && microbatch + 1 == strategy.gradient_accumulation;
  reducer->finish(last || strategy.gradient_sync == GradientSync::kEachMicrobatch, has_batch);
  if (residency) residency->end_round();
  rounds.add(RoundLog::kEnd);
  rounds.end_round();
}

void Engine::State::end_backward(const at::Tensor& loss, const MicrobatchInfo& info) {
  end_round(/*ends=*/!info.retain_graph, /*has_batch=*/true);
  if (info.weight > 0) step->add_loss(loss, info.weight, strategy.gradient_accumulation);
  local.tokens += info.tokens;
  local.samples += info.samples;
  if (info.retain_graph) {
    microbatch_weight = info.weight;
  } else {
    ++microbatch;
    local.weight += info.weight;
    microbatch_weight.reset();
    rounds.end_microbatch();
  }
  if (use_times) use_times->mark(UseTimes::Event::kBackwardEnd);
}

double Engine::State::communication_seconds() const {
  if (accelerator.device.is_queued) return 0;  // StepResult::wait asks the device
  const double gathers = residency ? residency->counts().gather_seconds : publication ? publication->seconds() : 0;
  return gathers + reducer->counts().reduction_seconds + step->communication_seconds();
}

StepResult Engine::State::take_step() {
  if (use_times) use_times->mark(UseTimes::Event::kStep);
  {
    const Span span("checks");
    expect_parameters();
    hooks->expect_untouched();
  }
  settle_commit();
  local.gathered = log->entries();
  const std::chrono::duration<double> since = std::chrono::steady_clock::now() - last_step_end;
  local.busy_seconds = since.count() - (communication_seconds() - communication_before);
  StepResult result;
  result.step = ++attempts;
  step->run(local, result);
  if (outer) outer->after(attempts);
  if (const std::int64_t every = strategy.check.replica_hash_every; every > 0 && attempts % every == 0) {
    const Span span("compare replicas");
    if (publication) publication->finish();
    if (accelerator.device.is_queued) static_cast<void>(step->progress());  // waits for the steps under way
    expect_equal_replicas(units, plan, *whole.control, attempts);
  }
  if ((result.overflow || result.spike) && plan.use()[MemoryCategory::kFeedback] > 0) reducer->restore_feedback();
  make_buffers_alike();
  if (attempts == 1 && accelerator.allocated) note_activations();
  if (attempts == 1 && activations) note_offloaded_activations();
  result.planned = plan.use();
  result.allocated = allocated(When::kAtMost);
  begin_next_step();
  const auto now = std::chrono::steady_clock::now();
  result.seconds = std::chrono::duration<double>(now - last_step_end).count();
  result.communication_seconds = communication_seconds() - communication_before;
  communication_before += result.communication_seconds;
  if (Trace::on()) Trace::record("step", {}, last_step_end, now);
  result.tokens_per_second = static_cast<double>(result.tokens) / result.seconds;
  last_step_end = now;
  last_step_seconds = result.seconds;
  if (use_times) use_times->mark(UseTimes::Event::kStepEnd);
  return result;
}

bool Engine::State::save_has_ended() {
  if (!saving) return false;
  const char own = saving->has_ended() ? 1 : 0;
  std::vector<char> all(static_cast<std::size_t>(whole.control->size()));
  throw_if_error(whole.control->all_gather("checkpoint ended", &own, all.data(), 1).wait());
  return std::ranges::all_of(all, [](char ended) { return ended == 1; });
}

void Engine::State::bring_replicas_together(const char* what) {
  // Averages ("ema") that have the masters' place are no weights to step with: they stay the replica's until a save.
  if (!outer || !outer->is_due() || shows_ema) return;
  expect(open_guards == 0, what,
         " between two outer steps makes one, which cannot be under a Gathered guard. [T0156] hint: close it first");
  expect(microbatch == 0, what,
         " between backward and step makes an outer step (\"sync\"). [T0157] hint: call step() or zero_grad() first");
  or_abort(what, [&] {
    expect_parameters();
    // Others of this replica may still be reading the copy that they share.
    if (plan.input().placement.shared) throw_if_error(axes.gather->barrier("outer step").wait());
    for (auto& unit : units) {
      if (unit->keeper()) unit->keeper()->drop(*unit);
      unit->gathered_hash = 0;
    }
    outer->step();
    accept_new_values();
  });
}

/// Once: what the first step needed beside what was there before it.
void Engine::State::note_activations() {
  const AllocatedBytes allocated = accelerator.allocated();
  activation_bytes = allocated.peak - allocated_at_start;
  if (mesh.rank() != 0) return;
  log_info("the first step needed " + format_bytes(*activation_bytes) + " of activations beside the plan's " +
           format_bytes(plan.use().total()) + "; LibTorch's allocator had " + format_bytes(allocated.peak) +
           " in use at most");
}

/// Likewise: what the tier had to hold.
void Engine::State::note_offloaded_activations() const {
  if (mesh.rank() != 0) return;
  const ActivationCounts counts = activations->counts();
  log_info("the first step put " + format_bytes(counts.bytes_put) + " of activations in " +
           std::to_string(counts.values) + " pieces of memory on tier \"" +
           (strategy.offload.activations == Tier::kHost ? "host" : "nvme") + "\", at most " +
           format_bytes(counts.peak_bytes) + " at a time, and brought " + format_bytes(counts.bytes_got) + " back");
}

void Engine::State::make_buffers_alike() {
  if (strategy.broadcast_buffers == BufferBroadcast::kNone || mesh.world_size() == 1) return;
  const Span span("buffers");
  sync_buffers(*module, mesh,
               strategy.broadcast_buffers == BufferBroadcast::kMean ? BufferSync::kMean : BufferSync::kFromRankZero);
}

void Engine::State::begin_next_step() {
  if (residency) residency->release_all();
  log->reset();
  drop_microbatches();
  // Where units are updated in backward, one whose gradients were taken for complete could not take another, so all are
  // waited for. And a step in which nothing counted says nothing of the next one.
  const std::vector<char>* const used = updates_in_backward() ? nullptr : step->known_used();
  if (used && std::ranges::any_of(*used, [](char each) { return each != 0; })) reducer->expect(*used);
  for (auto& unit : units) unit->reopen();
  accept_new_values();
  if (residency) residency->gather_ahead();
}

void Engine::State::accept_new_values() {
  // Graphs made before must not be run backward on the new values.
  for_each_trainable(units, [](FlatGroup& group) {
    for (FlatParameter& parameter : group.parameters) parameter.tensor.unsafeGetTensorImpl()->bump_version();
  });
  const Span span("checks");
  checks->accept();
}

void Engine::State::drop_microbatches() {
  reducer->reset();
  if (norm) norm->reset();
  hooks->begin_step();
  local = {};
  microbatch = 0;
  microbatch_weight.reset();
}

}  // namespace tessera
