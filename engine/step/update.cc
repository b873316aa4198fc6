#include "engine/step/update.h"

#include <algorithm>

#include "engine/memory/optimizer_slice.h"
#include "tessera/span.h"

namespace tessera {

Update::Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
               const MeshAxes& axes)
    : units_(units), optimizer_(optimizer), state_dtype_(plan.input().state_dtype), publisher_(plan, axes) {
  std::size_t count = 0;
  for_each_trainable(units_, [&](const FlatGroup& group) { count += group.parameters.size(); });
  steps_.resize(count, 0);
}

void Update::apply(float gradient_scale, float lr, const std::vector<char>& used) {
  const Span span("update");
  std::size_t first = 0;
  for_each_trainable(units_, [&](FlatGroup& group) {
    update_group(group, {gradient_scale, lr, 0}, &steps_[first], &used[first]);
    publisher_.publish(group);
    first += group.parameters.size();
  });
  publisher_.finish();
}

void Update::write_counts(std::map<const c10::TensorImpl*, std::int64_t>& counts) const {
  auto steps = steps_.begin();
  for_each_trainable(units_, [&](const FlatGroup& group) {
    for (const FlatParameter& parameter : group.parameters) {
      counts[parameter.tensor.unsafeGetTensorImpl()] = *steps++;
    }
  });
}

void Update::read_counts(const std::map<const c10::TensorImpl*, std::int64_t>& counts) {
  auto steps = steps_.begin();
  for_each_trainable(units_, [&](const FlatGroup& group) {
    for (const FlatParameter& parameter : group.parameters) {
      const auto found = counts.find(parameter.tensor.unsafeGetTensorImpl());
      *steps++ = found == counts.end() ? 0 : found->second;
    }
  });
}

void Update::update_group(FlatGroup& group, StepScalars scalars, std::int64_t* steps, const char* used) {
  const std::size_t count = group.parameters.size();
  for (std::size_t i = 0; i < count; ++i) steps[i] += used[i] ? 1 : 0;
  const bool as_one = std::all_of(used, used + count, [](char u) { return u != 0; }) &&
                      std::all_of(steps, steps + count, [&](std::int64_t s) { return s == steps[0]; });
  if (as_one) {
    scalars.step = steps[0];
    update_run(group, scalars, group.optimizer_part);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    if (!used[i]) continue;
    scalars.step = steps[i];
    const Extent run = intersect(group.layout.extent(i), group.optimizer_part);
    if (run.numel > 0) update_run(group, scalars, run);
  }
}

void Update::update_run(const FlatGroup& group, const StepScalars& scalars, Extent run) const {
  optimizer_.step(scalars, optimizer_slice(group, run, optimizer_.num_states(), state_dtype_));
}

}  // namespace tessera
