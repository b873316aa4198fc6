#include "tessera/engine.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <chrono>
#include <cmath>
#include <cstring>
#include <exception>
#include <limits>
#include <optional>
#include <sstream>

#include "engine/engine_state.h"
#include "engine/memory/tensor_heap.h"
#include "engine/mesh_shape.h"
#include "engine/run_scope.h"
#include "engine/step/step_agreement.h"
#include "optim/loss_scaler.h"
#include "optim/lr_schedule.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/span.h"
#include "sharding/partition.h"
#include "sharding/scalar_type.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

MeshPosition position_in(const MeshShape& shape, int rank) {
  return {shape.replicate, shape.shard, rank / shape.shard, rank % shape.shard};
}

int parts_for(const Strategy& strategy, const MeshPosition& mesh) {
  return parts_of(placement_of(strategy.strategy, strategy.optimizer.shard_over_world), mesh);
}

/// Units whose parameters some rank cannot reach without a gather.
std::vector<Unit*> to_be_gathered(const std::vector<std::unique_ptr<Unit>>& units, const MemoryPlan& plan) {
  const Placement& placement = plan.input().placement;
  if (!placement.parameters.shard || placement.shared || plan.input().mesh.shard_size == 1) return {};
  return pointers_to(units);
}

/// What replicated parameters stand on once their Engine is gone. The memory goes before the group it came from.
struct KeptMemory {
  std::shared_ptr<Collectives> group;
  Arena memory;
};

/// The group's parameters stand on `kept` from now on.
void keep_values(FlatGroup& group, KeptMemory kept) {
  std::byte* values = kept.group ? group.full : kept.memory.data();
  group.storage->set_data_ptr_noswap(at::DataPtr(
      values, new KeptMemory(std::move(kept)), [](void* memory) { delete static_cast<KeptMemory*>(memory); },
      group.device));
}

/// c10::Error puts its stack below the first line.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

/// Runs `body`; if it throws, the other ranks are told, so that none waits for this one. What comes out is the reason
/// that they are told, which is the first: an operator whose unit could not be gathered throws LibTorch's error, not
/// ours.
template <class Body>
auto Engine::State::or_abort(const char* what, const Body& body) {
  try {
    return body();
  } catch (const Error& error) {
    fail(make_error(error.exit_code(), error.message()));
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = explain_out_of_memory(std::string(what) + ": " + first_line(error.what()), plan, strategy,
                                                   shares_memory, activation_bytes);
    fail(make_error(ExitCode::kOsResource, text));
    throw Error(ExitCode::kOsResource, text);
  } catch (const std::exception& error) {
    const bool known = failed;
    fail(make_error(ExitCode::kInternal, std::string(what) + ": " + first_line(error.what())));
    if (known) throw Error(mesh.status());
    throw;
  }
}

Engine::State::State(std::shared_ptr<torch::nn::Module> module_given, const Strategy& strategy_given,
                     const Mesh& mesh_given)
    : module(std::move(module_given)),
      strategy(strategy_given),
      mesh(mesh_given),
      scaler(strategy.mixed_precision.loss_scale) {
  try {
    or_abort("Engine", [&] { set_up(); });
  } catch (...) {
    detach_parameters();
    throw;
  }
}

void Engine::State::set_up() {
  if (strategy.memory.tensor_heap) install_tensor_heap();
  const MeshShape shape = mesh_shape(strategy, mesh.topology());
  const MeshPosition position = position_in(shape, mesh.rank());
  optimizer = make_optimizer(strategy.optimizer);
  units = partition(*module, strategy, parts_for(strategy, position));
  axes = value_or_throw(mesh.axes(shape.replicate, shape.shard));
  check_transport();
  accelerator = accelerator_of(*axes.world);
  const ComputeDevice device = accelerator.device;
  uploader.emplace(device, accelerator.kernels.get());
  shares_memory = !device.is_queued && axes.gather->shares_memory();
  const PlanScene scene{position, shares_memory, device.is_queued};
  plan = make_plan(units, strategy, scene, *optimizer);
  if (mesh.rank() == 0) report_plan();
  check_memory_limit(plan, strategy, shares_memory);

  memory = TrainingMemory::allocate(plan, units, axes, device.device);
  memory_use = memory.allocated();
  for (auto& unit : units) load_parameters(*unit, *axes.control);
  // All parts are written before any is read.
  if (plan.input().placement.shared) throw_if_error(axes.gather->barrier("parameters").wait());
  load_buffers(*module, *axes.control, device.device);
  if (!device.is_queued) norm.emplace(units);
  reducer.emplace(plan, pointers_to(units), axes, std::move(memory.buckets), std::move(memory.scratch), device,
                  norm ? &*norm : nullptr);
  hooks.emplace(units, *reducer);
  if (device.is_queued) {
    device_step.emplace(units, plan, axes, *reducer, strategy, *optimizer, accelerator);
  } else {
    agreement.emplace(units, plan, axes, *reducer, *norm);
    update.emplace(units, *optimizer, plan, axes);
  }
  if (auto sharded = to_be_gathered(units, plan); !sharded.empty()) {
    residency.emplace(plan, std::move(sharded), *axes.gather, std::move(memory.slots), device,
                      [this](const Error& error) { fail(make_error(error.exit_code(), error.message())); });
    watch.emplace();
  }
  expect_plan();
  if (accelerator.allocated) allocated_at_start = accelerator.allocated().now;
  if (accelerator.forget_peak) accelerator.forget_peak();
  last_step_end = Clock::now();
}

/// The mesh was made before the Engine saw the strategy; what the file says of transports must have reached it.
void Engine::State::check_transport() const {
  const char* wanted = nullptr;
  bool on_gpu = false;
  switch (strategy.comm.transport) {
    case TransportChoice::kAuto:
      return;
    case TransportChoice::kHost:
      wanted = "host";
      break;
    case TransportChoice::kGloo:
      wanted = "gloo";
      break;
    case TransportChoice::kNccl:
      wanted = "nccl", on_gpu = true;
      break;
    case TransportChoice::kCudaHost:
      wanted = "cuda_host", on_gpu = true;
      break;
  }
  // A rank alone has no transport, but it has a device.
  const bool right_device = on_gpu == (axes.world->gpu() != Collectives::kHostMemory);
  const bool right_transport = mesh.world_size() == 1 || axes.world->transport().find(wanted) != std::string::npos;
  if (right_device && right_transport) return;
  throw Error(ExitCode::kConfig, std::string("/comm/transport is \"") + wanted + "\", but the mesh was made with " +
                                     axes.world->transport() + ". hint: call tessera::init(strategy.comm)");
}

void Engine::State::report_plan() const {
  std::ostringstream text;
  text << "plan of " << name_of(strategy.strategy) << ", mesh " << plan.input().mesh.replicate_size << " x "
       << plan.input().mesh.shard_size << ", " << units.size() << " units, parameters "
       << name_of(strategy.mixed_precision.param) << ", gradients on the wire "
       << name_of(strategy.mixed_precision.reduce) << ", optimizer state " << name_of(strategy.optimizer.state_dtype)
       << (plan.input().placement.shared ? ", one copy of the parameters for the ranks of a host\n" : "\n")
       << plan.to_table();
  log_info(text.str());
  if (units.size() == 1 && plan.use()[MemoryCategory::kSlots] > 0) {
    log_warning("the whole module is one unit, so it is gathered at once. hint: name classes in \"units\"");
  }
}

MemoryUse Engine::State::allocated() const {
  MemoryUse use = memory_use;
  if (residency) use[MemoryCategory::kSlots] += residency->counts().overflow_bytes;
  use[MemoryCategory::kBuckets] += reducer->counts().overflow_bytes;
  return use;
}

/// What was allocated is what was planned, to the byte.
void Engine::State::expect_plan() const {
  TORCH_INTERNAL_ASSERT(memory_use == plan.use(), "the allocation departs from the plan");
}

void Engine::State::fail(const absl::Status& reason) {
  failed = true;
  mesh.abort(reason);
}

Engine::Engine(std::shared_ptr<torch::nn::Module> module, const Strategy& strategy, const Mesh& mesh)
    : state_(std::make_unique<State>(std::move(module), strategy, mesh)) {}

Engine::~Engine() {
  // An exception is passing by: the others must not wait for this rank.
  const bool unwinding = std::uncaught_exceptions() > state_->exceptions_at_start;
  if (unwinding && RunScope::current) {
    const State& s = *state_;
    RunScope::current->memory_story =
        explain_out_of_memory("", s.plan, s.strategy, s.shares_memory, s.activation_bytes);
  }
  if (unwinding && !state_->failed && !state_->mesh.keep_for_report(state_->axes)) {
    state_->fail(make_error(ExitCode::kInternal, "an exception ended the training loop"));
  }
  state_->detach_parameters();
}

/// Replicated values outlive the engine: with their memory, or as a copy of their own if they shared it. Parameters
/// that the strategy shards say why they have none.
void Engine::State::detach_parameters() {
  hooks.reset();
  watch.reset();
  const bool sharded = placement_of(strategy.strategy, false).parameters.shard && plan.input().mesh.shard_size > 1;
  for (auto& unit : units) {
    if (sharded) {
      unit->poison("unit " + unit->name + " was sharded by an Engine that is gone");
      continue;
    }
    for (auto& group : unit->groups) {
      if (!group->full) continue;  // set-up failed before it had memory
      if (plan.input().placement.shared) {
        Arena copy = Arena::plain("parameters", group->gathered_bytes());
        std::memcpy(copy.take(copy.bytes()), group->full, copy.bytes());
        keep_values(*group, {nullptr, std::move(copy)});
      } else {
        keep_values(*group, {axes.gather, memory.parameters});
      }
    }
  }
}

void Engine::backward(const at::Tensor& loss, const MicrobatchInfo& info) {
  State& s = *state_;
  TORCH_CHECK(s.microbatch < s.strategy.gradient_accumulation, "backward was called ", s.microbatch + 1,
              " times in a step, but gradient_accumulation is ", s.strategy.gradient_accumulation,
              ": call step() first");
  TORCH_CHECK(loss.numel() == 1, "backward wants a scalar loss, got a tensor of sizes ", loss.sizes());
  TORCH_CHECK(loss.device() == device(), "backward wants a loss on ", device(), ", got one on ", loss.device(),
              ": move the module's inputs there");
  s.or_abort("backward", [&] {
    const Span span("backward");
    torch::autograd::backward({loss}, {s.seed_of(loss)});
    const bool last = s.microbatch + 1 == s.strategy.gradient_accumulation;
    s.reducer->finish(last || s.strategy.gradient_sync == GradientSync::kEachMicrobatch);
    if (s.residency) s.residency->end_round();
    s.note_loss(loss);
    s.local.tokens += info.tokens;
    s.local.samples += info.samples;
    ++s.microbatch;
  });
}

at::Tensor Engine::State::seed_of(const at::Tensor& loss) const {
  if (!device_step) return at::full_like(loss, loss_scale());
  const at::Tensor seed = at::ones_like(loss);
  return scales_loss() ? seed.mul_(device_step->loss_scale()) : seed;
}

void Engine::State::note_loss(const at::Tensor& loss) {
  if (device_step) return device_step->add_loss(loss, strategy.gradient_accumulation);
  local.loss += loss.item<double>() / static_cast<double>(strategy.gradient_accumulation);
}

bool Engine::step_is_due() const { return state_->microbatch == state_->strategy.gradient_accumulation; }

StepResult Engine::step() {
  State& s = *state_;
  TORCH_CHECK(step_is_due(), "step wants ", s.strategy.gradient_accumulation,
              " microbatches (gradient_accumulation), backward was called ", s.microbatch, " times");
  return s.or_abort("step", [&] { return s.step(); });
}

double Engine::State::communication_seconds() const {
  if (device_step) return 0;  // StepResult::wait asks the device
  const double gathers = residency ? residency->counts().gather_seconds : 0;
  return gathers + reducer->counts().reduction_seconds + agreement->exchange_seconds() + update->publish_seconds();
}

double Engine::State::loss_scale() const {
  if (!scales_loss()) return 1.0;
  return device_step ? device_step->latest().scaler.scale : scaler.scale();
}

StepResult Engine::State::step() {
  if (residency) local.gathered = residency->gathered();
  StepResult result;
  result.step = ++attempts;
  device_step ? step_on_device(result) : step_on_cpu(result);
  if (attempts == 1 && accelerator.allocated) note_activations();
  begin_next_step();
  result.planned = plan.use();
  result.allocated = allocated();
  const auto now = Clock::now();
  result.seconds = std::chrono::duration<double>(now - last_step_end).count();
  result.communication_seconds = communication_seconds() - communication_before;
  communication_before += result.communication_seconds;
  if (Trace::on()) Trace::record("step", {}, last_step_end, now);
  result.tokens_per_second = static_cast<double>(result.tokens) / result.seconds;
  last_step_end = now;
  return result;
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

void Engine::State::expect_samples(std::int64_t samples) const {
  TORCH_CHECK(strategy.lr_schedule.base_batch_size == 0 || samples > 0,
              "lr_schedule.base_batch_size needs the number of samples: pass MicrobatchInfo::samples to backward");
}

void Engine::State::step_on_cpu(StepResult& result) {
  const AgreedStep& agreed = agreement->agree(local);
  expect_samples(agreed.samples);
  result.loss = agreed.loss;
  result.tokens = agreed.tokens;
  result.loss_scale = loss_scale();
  result.overflow = !agreed.finite || !std::isfinite(agreed.sum_of_squares);
  result.lr = lr_at(strategy.lr_schedule, strategy.optimizer.lr, applied, agreed.samples);
  const auto microbatches = static_cast<double>(mesh.world_size() * strategy.gradient_accumulation);
  const double mean = 1.0 / (microbatches * result.loss_scale);
  result.grad_norm = std::sqrt(agreed.sum_of_squares) * mean;
  if (result.overflow) {
    warn_of_overflow(attempts, result.loss_scale);
  } else {
    // torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), at most 1.
    const double most = strategy.gradient_clipping;
    const double clip = most > 0 ? std::min(1.0, most / (result.grad_norm + 1e-6)) : 1.0;
    update->apply(static_cast<float>(mean * clip), static_cast<float>(result.lr), agreed.used);
    ++applied;
  }
  if (scales_loss()) scaler.update(result.overflow);
}

/// What the device will find out is not known yet.
void Engine::State::step_on_device(StepResult& result) {
  expect_samples(local.samples);
  result.loss = result.grad_norm = result.lr = result.loss_scale = std::numeric_limits<double>::quiet_NaN();
  result.outcome_ = device_step->run(local);
}

void Engine::State::begin_next_step() {
  if (residency) residency->release_all();
  reducer->reset();
  if (norm) norm->reset();
  // Graphs made before the update must not be run backward on the new values.
  for_each_trainable(units, [](FlatGroup& group) {
    for (FlatParameter& parameter : group.parameters) parameter.tensor.unsafeGetTensorImpl()->bump_version();
  });
  local = {};
  microbatch = 0;
}

at::Tensor Engine::to_compute_dtype(const at::Tensor& input) const {
  return input.is_floating_point() ? input.to(scalar_type_of(state_->strategy.mixed_precision.param)) : input;
}

const Strategy& Engine::strategy() const { return state_->strategy; }
const MemoryPlan& Engine::plan() const { return state_->plan; }
MemoryUse Engine::allocated() const { return state_->allocated(); }
void Engine::check() const { throw_if_error(state_->axes.status()); }

Upload Engine::upload(const std::vector<at::Tensor>& host) { return state_->uploader->start(host); }

at::Device Engine::device() const { return state_->accelerator.device.device; }

std::optional<std::int64_t> Engine::activation_bytes() const { return state_->activation_bytes; }

std::int64_t Engine::steps_applied() const {
  return state_->device_step ? state_->device_step->latest().applied : state_->applied;
}

double Engine::loss_scale() const { return state_->loss_scale(); }

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
  return counts;
}

std::vector<std::string> Engine::unit_names() const {
  std::vector<std::string> names;
  for (const auto& unit : state_->units) names.push_back(unit->name);
  return names;
}

MemoryPlan plan_memory(torch::nn::Module& module, const Strategy& strategy, const Topology& topology) {
  const MeshShape shape = mesh_shape(strategy, topology);
  const MeshPosition position = position_in(shape, topology.rank);
  const auto optimizer = make_optimizer(strategy.optimizer);
  PlanScene scene{position};
  scene.shares_memory = would_share_memory(shape, topology, strategy.comm.transport);
  const TransportChoice transport = strategy.comm.transport;
  scene.is_queued = transport == TransportChoice::kNccl || transport == TransportChoice::kCudaHost;
  const auto units = partition(module, strategy, parts_for(strategy, position));
  return make_plan(units, strategy, scene, *optimizer);
}

}  // namespace tessera
