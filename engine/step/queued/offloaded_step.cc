#include "engine/step/queued/offloaded_step.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <string>

#include "engine/step/queued/host_update.h"
#include "runtime/base/bytes.h"
#include "runtime/base/log.h"
#include "runtime/base/process/on_threads.h"
#include "runtime/base/state_dtype.h"
#include "runtime/border/throw.h"
#include "runtime/config/strategy_names.h"
#include "sharding/arena.h"

namespace tessera {
namespace {

constexpr std::int64_t kMostCopiedBytes = std::int64_t{64} << 20, kMostElements = std::int64_t{8} << 20;

/// Counts the elements of trainable groups whose state the plan keeps in records.
std::int64_t elements_below(const MemoryPlan& plan) {
  std::int64_t elements = 0;
  for_each_trainable(plan.units(), [&](const GroupShape& group) {
    const RecordLayout records = plan.records_of(group);
    elements += records.numel() - records.before_records();
  });
  return elements;
}

template <class Body>
double seconds_taken_by(const Body& body) {
  body();  // first run, not measured: it includes work that happens only once
  const auto begin = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

void measure_copies(DeviceKernels& kernels, c10::Device device, std::int64_t bytes, OffloadSpeeds& speeds) {
  const std::int64_t half = std::max<std::int64_t>(bytes / 2 / 64 * 64, 64);
  const std::shared_ptr<std::byte> host = kernels.pinned_memory(static_cast<std::size_t>(2 * half));
  const Arena gpu = Arena::plain("measured copies", 2 * half, device);
  const auto up = [&] {
    const DeviceKernels::UploadPiece piece{gpu.data(), host.get(), static_cast<std::size_t>(half)};
    return kernels.upload({&piece, 1}, nullptr);
  };
  const auto down = [&] {
    return kernels.download(host.get() + half, gpu.data() + half, static_cast<std::size_t>(half));
  };
  kernels.mark()->wait();  // waits until the memory has its values
  const auto size = static_cast<double>(half);
  speeds.to_gpu = size / seconds_taken_by([&] { up()->wait(); });
  speeds.to_host = size / seconds_taken_by([&] { down()->wait(); });
  speeds.both_ways = size / seconds_taken_by([&] {
                       const auto there = up(), back = down();
                       there->wait();
                       back->wait();
                     });
}

/// A run of elements as in a record, with their gradients and parameters.
struct MeasuredPiece {
  MeasuredPiece(DType dtype, MasterKind kind, const StateFormats& formats)
      : gradient(kHostPiece), states(formats.size()) {
    slice.gradient = gradient;
    slice.master_kind = kind;
    if (kind == MasterKind::kSplitBF16) {
      low.resize(kHostPiece);
      slice.low = low;
    } else {
      master.resize(kHostPiece);
      slice.master = master;
    }
    if (dtype != DType::kF32) {
      parameter.resize(kHostPiece * size_of(dtype));
      slice.parameter = parameter.data();
      slice.parameter_dtype = dtype;
    }
    for (std::size_t i = 0; i < formats.size(); ++i) {
      const StateBytes bytes = state_bytes(formats[i], kHostPiece);
      states[i].data.resize(static_cast<std::size_t>(bytes.data));
      states[i].scales.resize(static_cast<std::size_t>(bytes.scales) / sizeof(float));
      slice.states[i] = {states[i].data, states[i].scales};
    }
  }

  struct State {
    std::vector<std::byte> data;
    std::vector<float> scales;
  };
  std::vector<float> gradient, master;
  std::vector<std::int16_t> low;
  std::vector<std::byte> parameter;
  std::vector<State> states;
  OptimizerSlice slice;
};

/// Returns the number of elements that are updated per second, with the dtype, masters and states that the strategy
/// gives parameters.
double measure_update(const Optimizer& optimizer, const Strategy& strategy, std::int64_t elements) {
  const DType dtype = strategy.mixed_precision.param;
  const MasterKind kind = master_kind_of(strategy.mixed_precision.master, dtype);
  const auto count = static_cast<std::size_t>((elements + kHostPiece - 1) / kHostPiece);
  std::vector<MeasuredPiece> pieces;
  pieces.reserve(count);
  for (std::size_t i = 0; i < count; ++i) pieces.emplace_back(dtype, kind, optimizer.state_formats());
  const double seconds = seconds_taken_by(
      [&] { on_threads(count, host_update_threads(), [&](std::size_t i) { optimizer.step({}, pieces[i].slice); }); });
  return static_cast<double>(count * kHostPiece) / seconds;
}

OffloadSeconds slowest_of(const OffloadSeconds& own, Collectives& control) {
  std::vector<OffloadSeconds> all(static_cast<std::size_t>(control.size()));
  throw_if_error(control.all_gather("offload.step", &own, all.data(), sizeof own).wait());
  OffloadSeconds slowest;
  for (const OffloadSeconds& each : all) {
    slowest.on_cpu = std::max(slowest.on_cpu, each.on_cpu);
    slowest.on_gpu = std::max(slowest.on_gpu, each.on_gpu);
  }
  return slowest;
}

std::string rate(double bytes) { return format_bytes(static_cast<std::int64_t>(bytes)) + "/s"; }

std::string text_of(const OffloadSpeeds& speeds, const OffloadSeconds& seconds) {
  return "Measured now, on rank 0: " + rate(speeds.to_host) + " to the host, " + rate(speeds.to_gpu) + " to the GPU, " +
         rate(speeds.both_ways) + " each way at once, and the CPU updates " + std::to_string(speeds.updated) +
         " elements/s; so on the slowest rank a step needs at most " + std::to_string(seconds.on_cpu) +
         " s with the CPU, and " + std::to_string(seconds.on_gpu) + " s with the GPU";
}

}  // namespace

OffloadSeconds seconds_of(const OffloadSpeeds& speeds, const MemoryPlan& on_cpu, const MemoryPlan& on_gpu) {
  const auto to_host = static_cast<double>(on_cpu.passes().host_step.to_host);
  const auto to_gpu = static_cast<double>(on_cpu.passes().host_step.to_gpu);
  const auto elements = static_cast<double>(elements_below(on_cpu));
  const auto sums_back = [&](const MemoryPlan& plan) {
    return static_cast<double>(plan.records().gradient_copies.to_gpu) / speeds.to_gpu;
  };
  const HostStepBytes parameters = on_gpu.updated_over_bus();
  return {to_host / speeds.to_host + std::max(elements / speeds.updated, to_gpu / speeds.to_gpu) + sums_back(on_cpu),
          static_cast<double>(on_gpu.records().streamed_bytes) / speeds.both_ways + sums_back(on_gpu) +
              static_cast<double>(parameters.to_host) / speeds.to_host +
              static_cast<double>(parameters.to_gpu) / speeds.to_gpu};
}

std::optional<OffloadedStep> choose_offloaded_step(const std::vector<std::unique_ptr<Unit>>& units,
                                                   const Strategy& strategy, const PlanScene& scene,
                                                   const Optimizer& optimizer, Accelerator& accelerator,
                                                   Collectives& control) {
  if (!scene.is_queued || strategy.offload.step != OffloadedStep::kAuto) return std::nullopt;
  PlanScene with = scene;
  with.offloaded_step = OffloadedStep::kGpu;
  const MemoryPlan on_gpu = make_plan(units, strategy, with, optimizer);
  if (on_gpu.records().states.pinned_bytes == 0) return std::nullopt;
  const auto tell = [&](const std::string& choice) {
    if (control.rank() == 0)
      log_info("offload.step auto: masters and moments in the host's memory are updated by " + choice);
  };
  if (strategy.optimizer.type == OptimizerType::kOwn) {
    tell(
        "the GPU, which computes a program's rule there. [T0281] hint: offload.step \"cpu\" has the rule called with "
        "tensors of the host");
    return OffloadedStep::kGpu;
  }
  if (!on_gpu.can_step_on_host()) {
    tell(strategy.optimizer.in_backward ? "the GPU, as units are updated in backward"
         : on_gpu.passes_twice()        ? "the GPU, as " + name_of(strategy.optimizer.type) +
                                       (on_gpu.update().twice ? " goes over them twice" : " looks at whole matrices")
         : on_gpu.has_whole_records() ? "the GPU, since parameters lie in files"
                                      : "the GPU, since some elements have only one of the two there");
    return OffloadedStep::kGpu;
  }
  with.offloaded_step = OffloadedStep::kCpu;
  const MemoryPlan on_cpu = make_plan(units, strategy, with, optimizer);
  const auto fits = [limit = strategy.memory.limit_bytes](const MemoryPlan& plan) {
    return limit <= 0 || plan.use().limited() <= limit;
  };
  if (!fits(on_gpu) && fits(on_cpu)) {
    tell("the CPU there, since memory.limit leaves no room for them on the GPU");
    return OffloadedStep::kCpu;
  }
  const OffloadConfig& offload = strategy.offload;
  const bool chooses = offload.masters.tier == Tier::kAuto || offload.moments.tier == Tier::kAuto ||
                       offload.parameters.tier == Tier::kAuto;
  if (chooses && strategy.durable.every > 0) {
    tell(
        "the GPU: \"durable\" wants what tier auto leaves there to be the same in each run. [T0282] hint: "
        "offload.step \"cpu\" may be faster");
    return OffloadedStep::kGpu;
  }
  OffloadSpeeds speeds;
  throw_if_error(control.barrier("offload.step").wait());  // so that all ranks measure at the same time
  measure_copies(*accelerator.kernels, accelerator.device.device,
                 std::min(on_gpu.records().streamed_bytes, kMostCopiedBytes), speeds);
  speeds.updated = measure_update(optimizer, strategy, std::min(elements_below(on_cpu), kMostElements));
  const OffloadSeconds seconds = slowest_of(seconds_of(speeds, on_cpu, on_gpu), control);
  const OffloadedStep chosen = seconds.on_cpu < seconds.on_gpu ? OffloadedStep::kCpu : OffloadedStep::kGpu;
  const std::string figures = text_of(speeds, seconds);
  tell((chosen == OffloadedStep::kCpu ? "the CPU there. " : "the GPU. ") + figures);
  return chosen;
}

}  // namespace tessera
