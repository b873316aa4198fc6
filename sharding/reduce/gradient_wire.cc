#include "sharding/reduce/gradient_wire.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "runtime/border/throw.h"
#include "runtime/comm/sum/wire_codec.h"
#include "sharding/compress/method_layout.h"
#include "sharding/reduce/comm_hook_method.h"

namespace tessera {

GradientWire::GradientWire(const ReduceSetup& setup, std::vector<Unit*> units, Arena feedback)
    : setup_(setup), units_(std::move(units)), memory_(std::move(feedback)) {
  const MemoryPlan& plan = setup_.plan;
  float* const method_work = reinterpret_cast<float*>(memory_.take(plan.sums().method_work_numel * 4));
  if (plan.wire().compression.restore_skipped) memory_.take(plan.sums().kept_gradient_numel * 4);
  for (const Unit* unit : units_) {
    std::vector<Feedback>& groups = feedback_.emplace_back();
    for (const auto& group : unit->groups) groups.push_back(take_feedback(*group, method_work));
  }
  memory_.expect_full();
}

GradientWire::Feedback GradientWire::take_feedback(const FlatGroup& group, float* method_work) {
  const MemoryPlan& plan = setup_.plan;
  const auto take = [&](std::int64_t count) {
    return count > 0 ? reinterpret_cast<float*>(memory_.take(count * 4)) : nullptr;
  };
  const GroupShape& shape = group.shape();
  const FeedbackNumel numel = plan.feedback_numel_of(shape);
  Feedback feedback{take(numel.shard), take(numel.replicate)};
  const MethodLayout layout = plan.method_layout_of(shape);
  if (layout.messages.empty()) return feedback;  // no method, or a hook of the program makes the sums
  std::vector<std::int64_t> numbers;
  for (const FlatParameter& parameter : group.parameters) numbers.push_back(parameter.number);
  const MeshPosition& mesh = plan.placement().mesh;
  feedback.method = value_or_throw(
      make_gradient_method(plan.wire().compression.method,
                           {shape, numbers, mesh.shard_index, mesh.shard_size, take(layout.memory.kept), method_work}));
  feedback.wire_bytes = layout.wire_bytes(setup_.mesh().shard_size);
  return feedback;
}

const GradientWire::Feedback& GradientWire::feedback_of(const FlatGroup& group) const {
  return feedback_[static_cast<std::size_t>(group.unit->index)][group.index];
}

void GradientWire::sum_by(const std::shared_ptr<CommHook>& hook) {
  std::int64_t buckets = 0;
  for (const Unit* unit : units_) {
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      Feedback& feedback = feedback_[static_cast<std::size_t>(unit->index)][group->index];
      feedback.method = std::make_unique<CommHookMethod>(*group, hook, buckets++);
      feedback.wire_bytes = group->layout.numel() * 4;  // counted as if fp32 were sent, since the plan does not have
                                                        // the messages of the hook
    }
  }
}

void GradientWire::use_methods(bool on, std::int64_t step) {
  uses_methods_ = on;
  copy();
  begin_step(step);
}

void GradientWire::reset() {
  has_copy_ = false;
  begin_step(0);
}

void GradientWire::begin_step(std::int64_t step) {
  for (auto& unit : feedback_) {
    for (Feedback& feedback : unit) {
      if (feedback.method) feedback.method->begin_step(step);
    }
  }
}

GradientMethod* GradientWire::method_of(const FlatGroup& group) const {
  return uses_methods_ && setup_.mesh().world_size() > 1 ? feedback_of(group).method.get() : nullptr;
}

/// `part` is the compressed_part of the axis.
ReduceOptions GradientWire::options_with(int part, float* feedback, Waits waits) const {
  ReduceOptions options(waits);
  if (part == 0) return options;
  options.contributions = setup_.plan.wire().compression.gradients;
  options.sums = setup_.plan.wire().compression.sums;
  options.feedback = feedback;
  return options;
}

ReduceOptions GradientWire::shard_options(const FlatGroup& group, Waits waits) const {
  const int part = setup_.plan.wire().compressed_shard_part;
  ReduceOptions options = options_with(part, feedback_of(group).shard, waits);
  if (part > 0) options.method = method_of(group);
  return options;
}

ReduceOptions GradientWire::replicate_options(const FlatGroup& group, Waits waits) const {
  return options_with(setup_.plan.wire().compressed_replicate_part, feedback_of(group).replicate, waits);
}

std::int64_t GradientWire::bytes_of(const FlatGroup& group, DType dtype, const ReduceOptions& options) const {
  if (setup_.mesh().world_size() == 1) return 0;
  if (method_of(group)) return feedback_of(group).wire_bytes;
  const auto numel = static_cast<std::size_t>(group.layout.numel());
  return static_cast<std::int64_t>(wire_bytes(options.contributions, dtype, numel));
}

void GradientWire::forget() {
  std::fill_n(memory_.data(), memory_.bytes(), std::byte{0});
  has_copy_ = false;
}

/// Copies the residuals. They lie at the end of the memory, and their copy lies in front of them.
void GradientWire::copy() {
  const std::int64_t bytes = 4 * setup_.plan.sums().kept_gradient_numel;
  if (!setup_.plan.wire().compression.restore_skipped || bytes == 0 || std::exchange(has_copy_, true)) return;
  std::byte* const kept = memory_.data() + memory_.bytes() - bytes;
  std::memcpy(kept - bytes, kept, static_cast<std::size_t>(bytes));
}

void GradientWire::restore() {
  if (!has_copy_) return forget();
  const std::int64_t bytes = 4 * setup_.plan.sums().kept_gradient_numel;
  std::byte* const kept = memory_.data() + memory_.bytes() - bytes;
  std::memcpy(kept, kept - bytes, static_cast<std::size_t>(bytes));
  has_copy_ = false;
}

KeptGradients GradientWire::kept() const {
  const MeshPosition& mesh = setup_.mesh();
  const PlannedWire& wire = setup_.plan.wire();
  const MeshAxes& axes = setup_.axes;
  const AxisPlacement placement = setup_.plan.placement().gradients;
  KeptGradients kept;
  using What = KeptGradients::What;
  const auto add = [&](FlatGroup& group, What what, const std::vector<Extent>& runs, float* values,
                       std::int64_t begin) {
    for (const Extent run : runs) {
      kept.residuals.push_back({&group, what, {begin + run.offset, run.numel}, values});
      values += run.numel;
    }
  };
  const int ranks = mesh.world_size();
  std::int64_t method_holders = 0;
  for (const Unit* unit : units_) {
    for (const auto& group : unit->groups) {
      const Feedback& feedback = feedback_of(*group);
      const std::int64_t numel = group->layout.numel();
      const Extent sum = owned({placement.shard, false}, mesh, numel);
      if (feedback.shard) {
        add(*group, What::kContributions,
            rounded_runs(axes.reduce->rank(), axes.reduce->size(), wire.compressed_shard_part, numel, placement.shard),
            feedback.shard, 0);
      }
      if (feedback.replicate) {
        add(*group, What::kReplicaContributions,
            rounded_runs(axes.replicate->rank(), axes.replicate->size(), wire.compressed_replicate_part, sum.numel,
                         placement.replicate),
            feedback.replicate, sum.offset);
      }
      if (!feedback.method) continue;
      feedback.method->add_kept(*group, kept);
      method_holders = feedback.method->holders(ranks);
    }
  }
  const auto holders = [&](int ranks, int part) { return part > 0 ? ranks / part : 0; };
  kept.holders = method_holders > 0 ? method_holders
                                    : holders(ranks, wire.compressed_shard_part) +
                                          holders(mesh.replicate_size, wire.compressed_replicate_part);
  return kept;
}

}  // namespace tessera
