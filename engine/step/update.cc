#include "engine/step/update.h"

#include <algorithm>

#include "tessera/span.h"

namespace tessera {

Update::Update(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const MemoryPlan& plan,
               const MeshAxes& axes, const TrainingMemory& memory)
    : units_(units),
      learning_rates_(strategy.optimizer),
      averages_(strategy.ema.decay > 0.0),
      passes_{Pass{StateKind::kParameters, memory.parameter_records.get()},
              Pass{StateKind::kMastersAndStates, memory.state_records.get()}},
      publisher_(plan, axes) {
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  optimizers_.push_back(make_optimizer(strategy.optimizer, strategy.ema));
  for (const ParameterGroup& group : strategy.optimizer.groups) {
    optimizers_.push_back(make_optimizer(config_of(strategy.optimizer, group), strategy.ema));
  }
  std::size_t count = 0;
  first_of_unit_.push_back(0);
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      groups_.push_back({group.get(), count});
      count += group->parameters.size();
    }
    first_of_unit_.push_back(groups_.size());
  }
  steps_.resize(count, 0);
  runs_.reserve(count);
}

std::span<Update::Group> Update::groups_of(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  const std::size_t begin = first_of_unit_[index];
  return std::span(groups_).subspan(begin, first_of_unit_[index + 1] - begin);
}

/// As if every parameter got a gradient, which is nearly always so.
void Update::expect(std::span<const int> order) {
  for (Pass& pass : passes_) pass.order.clear();
  if (order.empty()) {
    in_direction(0, groups_.size(), [&](std::size_t g) { announce(groups_[g], groups_[g].group->optimizer_part); });
  }
  for (const int unit : order) {
    for (Group& group : groups_of(*units_[static_cast<std::size_t>(unit)])) {
      announce(group, group.group->optimizer_part);
    }
  }
  begin_passes();
}

void Update::apply(const Rates& rates, const std::vector<char>& used) {
  const Span span("update");
  runs_.clear();
  for (Group& group : groups_) find_runs(group, std::span(used).subspan(group.first_parameter));
  visit_runs([&](const OptimizerSlice& slice, const Run& run) { update_run(slice, rates, run); });
}

void Update::apply(const Unit& unit, const Rates& rates, std::span<const char> used) {
  const Span span("update", unit.name);
  runs_.clear();
  for (Group& group : groups_of(unit)) {
    find_runs(group, used);
    used = used.subspan(group.group->parameters.size());
    visit_group(group, [&](const OptimizerSlice& slice, const Run& run) { update_run(slice, rates, run); });
    for (std::size_t p = 0; p < passes_.size(); ++p) {
      if (passes_[p].records) passes_[p].records->pass(group.records_before[p]);
    }
  }
}

void Update::finish() {
  publisher_.finish();
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->end_pass();
  }
}

void Update::swap_averages() {
  const Span span("averages");
  runs_.clear();
  const std::vector<char> unused(steps_.size());
  for (Group& group : groups_) find_runs(group, unused);
  visit_runs([&](const OptimizerSlice& slice, const Run& run) { optimizer_of(run.group).swap_average(slice); });
}

/// Calls `visit(slice, run)` for all runs, in this step's direction, and publishes what became of them. The next step goes
/// the other way.
template <class Visit>
void Update::visit_runs(const Visit& visit) {
  announce_runs();
  in_direction(0, groups_.size(), [&](std::size_t g) { visit_group(groups_[g], visit); });
  finish();
  direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

template <class Visit>
void Update::visit_group(const Group& group, const Visit& visit) {
  const FlatGroup& flat = *group.group;
  in_direction(group.begin, group.end, [&](std::size_t r) {
    const Run& run = runs_[r];
    for_each_state(
        flat, StateKind::kAll, run.extent, StateUse::kUpdate,
        [&](const StateView& view) { visit(optimizer_slice(flat, view), run); }, direction_);
  });
  publisher_.publish(*group.group);
}

/// Calls `visit(i)` for begin <= i < end, in this step's direction.
template <class Visit>
void Update::in_direction(std::size_t begin, std::size_t end, const Visit& visit) const {
  for (std::size_t i = begin; i < end; ++i) visit(direction_ == Direction::kForward ? i : end - 1 - (i - begin));
}

/// Neighbours that have taken part in equally many steps are one run, with the padding between them. `used`: of the group's
/// parameters, and more.
void Update::find_runs(Group& group, std::span<const char> used) {
  const FlatGroup& flat = *group.group;
  const std::size_t count = flat.parameters.size();
  std::int64_t* const steps = steps_.data() + group.first_parameter;
  const std::span<const char> takes_part = used.first(count);
  for (std::size_t i = 0; i < count; ++i) steps[i] += takes_part[i] ? 1 : 0;
  const auto is_visited = [&](std::size_t i) { return takes_part[i] || (averages_ && steps[i] > 0); };
  const auto goes_with = [&](std::size_t i, std::size_t j) {
    return is_visited(i) && is_visited(j) && takes_part[i] == takes_part[j] && steps[i] == steps[j] &&
           flat.parameters[i].group == flat.parameters[j].group;
  };
  group.begin = runs_.size();
  for (std::size_t i = 0; i < count;) {
    std::size_t end = i + 1;
    while (end < count && goes_with(i, end)) ++end;
    const bool is_all = i == 0 && end == count;
    const std::int64_t begin = flat.layout.extent(i).offset;
    const Extent extent =
        is_all ? Extent{0, flat.layout.numel()} : Extent{begin, flat.layout.extent(end - 1).end() - begin};
    const Extent run = intersect(extent, flat.optimizer_part);
    if (is_visited(i) && run.numel > 0) {
      runs_.push_back({run, steps[i], flat.parameters[i].group, takes_part[i] != 0});
    }
    i = end;
  }
  group.end = runs_.size();
}

/// So that they are read ahead.
void Update::announce_runs() {
  for (Pass& pass : passes_) pass.order.clear();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    in_direction(groups_[g].begin, groups_[g].end, [&](std::size_t r) { announce(groups_[g], runs_[r].extent); });
  });
  begin_passes();
}

void Update::announce(Group& group, Extent run) {
  for (std::size_t p = 0; p < passes_.size(); ++p) {
    Pass& pass = passes_[p];
    if (pass.records) append_records(*group.group, pass.kind, run, direction_, pass.order);
    group.records_before[p] = pass.order.size();
  }
}

void Update::begin_passes() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->begin_pass(pass.order);
  }
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

void Update::update_run(const OptimizerSlice& slice, const Rates& rates, const Run& run) const {
  const Optimizer& optimizer = optimizer_of(run.group);
  if (!run.is_updated) return optimizer.average(slice);
  const double lr = learning_rates_.of(rates.lr, run.group);
  optimizer.step({rates.gradient_scale, rates.clip_value, static_cast<float>(lr), run.step}, slice);
}

}  // namespace tessera
