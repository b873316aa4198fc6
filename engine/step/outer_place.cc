#include "engine/step/outer_place.h"

#include "engine/memory/master_weights.h"
#include "engine/memory/state_views.h"
#include "optim/device_kernels.h"
#include "optim/outer_pass.h"
#include "sharding/memory_view.h"

namespace tessera {
namespace {

class HostPlace final : public OuterPlace {
 public:
  c10::Device device() const override { return at::kCPU; }
  void read(const FlatGroup& group, float* flat) override {
    read_values(group, flat_view(flat, DType::kF32, group.layout.numel(), at::kCPU));
  }
  void write(FlatGroup& group, float* values, Extent at) override {
    write_values(group, flat_view(values, DType::kF32, at.numel, at::kCPU), at);
  }
  void pass(const OuterRun& run) override { outer_pass(run); }
};

/// REQUIRES: no values that it reads or writes are offloaded (sync_rules.cc refuses other strategies).
class GpuPlace final : public OuterPlace {
 public:
  GpuPlace(c10::Device device, DeviceKernels& kernels) : device_(device), kernels_(kernels) {}

  c10::Device device() const override { return device_; }
  void read(const FlatGroup& group, float* flat) override {
    const Extent part = group.optimizer_part;
    DeviceRun run;
    run.arguments = weights_of(group, part);
    kernels_.read_weights(run, flat + part.offset);
  }
  /// Writes this rank's part of masters, and separately the elements before and behind it. Those elements have no
  /// masters here if parameters are whole and masters are not.
  void write(FlatGroup& group, float* values, Extent at) override {
    const Extent all = intersect(group.parameter_part, at), part = intersect(group.optimizer_part, all);
    const Extent before{all.offset, part.offset - all.offset}, behind{part.end(), all.end() - part.end()};
    for (const Extent run : {before, part, behind}) {
      if (run.numel > 0) kernels_.write_weights(weights_of(group, run), values + (run.offset - at.offset));
    }
  }
  void pass(const OuterRun& run) override { kernels_.outer_pass(run); }

 private:
  /// Returns the weights of `run`, a run of the group's parameter part, with masters where this rank has them.
  static StepArguments weights_of(const FlatGroup& group, Extent run) {
    StepArguments weights;
    weights.numel = static_cast<std::size_t>(run.numel);
    weights.parameter = group.shard + (run.offset - group.parameter_part.offset) * group.element_bytes();
    const bool are_own = intersect(group.optimizer_part, run).numel == run.numel;
    const std::int64_t in_part = run.offset - group.optimizer_part.offset;
    if (group.dtype == DType::kF32) {
      weights.weights = WeightFormat::kF32;
      weights.master = static_cast<float*>(weights.parameter);
    } else if (group.master_kind == MasterKind::kSplitBF16) {
      weights.weights = WeightFormat::kSplitBF16;
      if (are_own) weights.low = group.master_low + in_part;
    } else {
      weights.weights = group.dtype == DType::kF16 ? WeightFormat::kF32AndF16 : WeightFormat::kF32AndBF16;
      if (are_own) weights.master = group.master + in_part;
    }
    return weights;
  }

  const c10::Device device_;
  DeviceKernels& kernels_;
};

}  // namespace

std::unique_ptr<OuterPlace> outer_place_of(const Accelerator& accelerator) {
  if (!accelerator.device.is_queued) return std::make_unique<HostPlace>();
  return std::make_unique<GpuPlace>(accelerator.device.device, *accelerator.kernels);
}

}  // namespace tessera
