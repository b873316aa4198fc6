#include "engine/step/update.h"

#include <algorithm>

#include "tessera/span.h"

namespace tessera {

Update::Update(const std::vector<std::unique_ptr<Unit>>& units, const Optimizer& optimizer, const MemoryPlan& plan,
               const MeshAxes& axes, StateRecords* records)
    : units_(units), optimizer_(optimizer), records_(records), publisher_(plan, axes) {
  std::size_t count = 0;
  for_each_trainable(units_, [&](FlatGroup& group) {
    groups_.push_back({&group, count});
    count += group.parameters.size();
  });
  steps_.resize(count, 0);
  runs_.reserve(count);
}

void Update::apply(float gradient_scale, float lr, const std::vector<char>& used) {
  const Span span("update");
  find_runs(used);
  if (records_) announce_records();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    const Group& group = groups_[g];
    in_direction(group.begin, group.end, [&](std::size_t r) {
      update_run(*group.group, {gradient_scale, lr, runs_[r].step}, runs_[r].extent);
    });
    publisher_.publish(*group.group);
  });
  publisher_.finish();
  if (!records_) return;
  records_->end_pass();
  direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

/// Calls `visit(i)` for begin <= i < end, in this step's direction.
template <class Visit>
void Update::in_direction(std::size_t begin, std::size_t end, const Visit& visit) const {
  for (std::size_t i = begin; i < end; ++i) visit(direction_ == Direction::kForward ? i : end - 1 - (i - begin));
}

/// A group whose parameters have all taken part in equally many steps is one run.
void Update::find_runs(const std::vector<char>& used) {
  runs_.clear();
  for (Group& group : groups_) {
    const FlatGroup& flat = *group.group;
    const std::size_t count = flat.parameters.size();
    std::int64_t* const steps = steps_.data() + group.first_parameter;
    const char* const takes_part = used.data() + group.first_parameter;
    for (std::size_t i = 0; i < count; ++i) steps[i] += takes_part[i] ? 1 : 0;
    const bool as_one = std::all_of(takes_part, takes_part + count, [](char u) { return u != 0; }) &&
                        std::all_of(steps, steps + count, [&](std::int64_t s) { return s == steps[0]; });
    group.begin = runs_.size();
    if (as_one) {
      runs_.push_back({flat.optimizer_part, steps[0]});
    } else {
      for (std::size_t i = 0; i < count; ++i) {
        const Extent run = intersect(flat.layout.extent(i), flat.optimizer_part);
        if (takes_part[i] && run.numel > 0) runs_.push_back({run, steps[i]});
      }
    }
    group.end = runs_.size();
  }
}

/// So that they are read ahead.
void Update::announce_records() {
  order_.clear();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    in_direction(groups_[g].begin, groups_[g].end,
                 [&](std::size_t r) { append_records(*groups_[g].group, runs_[r].extent, direction_, order_); });
  });
  records_->begin_pass(order_);
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

void Update::update_run(const FlatGroup& group, const StepScalars& scalars, Extent run) const {
  for_each_state(
      group, run, StateUse::kUpdate,
      [&](const StateView& view) { optimizer_.step(scalars, optimizer_slice(group, view)); }, direction_);
}

}  // namespace tessera
