#include "engine/step/update.h"

#include <algorithm>
#include <utility>

#include "engine/step/rules/naming.h"
#include "runtime/config/strategy_names.h"
#include "tessera/span.h"

namespace tessera {

Update::Update(const StepContext& context)
    : StepWalk(context),
      units_(context.units),
      learning_rates_(context.strategy.optimizer),
      options_(context.strategy.optimizer),
      elements_(context.strategy, context.own_rules, learning_rates_),
      passes_{Pass{StateKind::kParameters, context.memory.records.parameters.get()},
              Pass{StateKind::kMastersAndStates, context.memory.records.states.get()}} {
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  if (adapts_layers(optimizer.type)) layers_.emplace(context);
  if (!context.plan.passes().matrices.batches().empty())
    matrices_.emplace(context, make_tensor_rule(optimizer, context.own_rules));
  std::size_t count = 0;
  for_each_trainable(units_, [&](FlatGroup& group) {
    groups_.push_back({&group, count});
    count += group.parameters.size();
  });
  for (Pass& pass : passes_) pass.ends.resize(groups_.size());
  steps_.resize(count, 0);
  if (updates_in_backward()) used_in_backward_.resize(count);
  runs_.reserve(count);
}

void Update::follow_options() {
  if (std::exchange(followed_, options_.version()) == options_.version()) return;
  elements_.follow(options_);
  if (matrices_) matrices_->follow(options_);
  if (layers_) layers_->follow(options_);
}

void Update::read_ahead() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->read_ahead();
  }
}

void Update::apply(const Rates& rates, std::span<const char> used, std::span<const double> squares) {
  const Span span("update");
  follow_options();
  rates_ = rates;
  used_ = used;
  squares_ = squares;
  runs_.clear();
  for (Group& group : groups_) find_runs(group, used.subspan(group.first_parameter));
  update_all();
}

void Update::apply(Unit& unit, const Rates& rates, std::span<const char> used) {
  const Span span("update");
  follow_options();
  rates_ = rates;
  used_ = used_in_backward_;
  runs_.clear();
  for (Group& group : groups_of(unit)) {
    find_runs(group, used);
    std::ranges::copy(used.first(group.group->parameters.size()), used_in_backward_.begin() + group.first_parameter);
    used = used.subspan(group.group->parameters.size());
  }
  update_unit(unit);
}

std::span<Update::Group> Update::groups_of(const Unit& unit) {
  const auto unit_of = [](const Group& group) { return group.group->unit->index; };
  return std::ranges::equal_range(groups_, unit.index, {}, unit_of);
}

void Update::swap_averages() {
  const Span span("averages");
  const std::vector<char> unused(steps_.size());
  runs_.clear();
  for (Group& group : groups_) find_runs(group, unused);
  swap();
}

void Update::find_runs(Group& group, std::span<const char> used) {
  group.begin = runs_.size();
  elements_.find_runs(*group.group, group.group->optimizer_part, used, steps_.data() + group.first_parameter, runs_);
  group.end = runs_.size();
}

/// Calls `body(run)` for a group's runs, in the visit's direction.
template <class Body>
void Update::for_runs(const Visit& visit, const Body& body) const {
  const Group& group = group_of(visit);
  for (std::size_t i = group.begin; i < group.end; ++i) {
    body(runs_[visit.backward ? group.end - 1 - (i - group.begin) : i]);
  }
}

/// Calls `body(slice, run)` for each piece of a group's runs whose state lies together.
template <class Body>
void Update::for_slices(const Visit& visit, const Body& body) const {
  const FlatGroup& flat = *group_of(visit).group;
  for_runs(visit, [&](const Run& run) {
    for_each_state(
        flat, kind_of(visit), run.extent, use_of(visit),
        [&](const StateView& view) { body(optimizer_slice(flat, view), run); }, direction_of(visit));
  });
}

void Update::announce(std::span<const Visit> visits, bool is_decided) {
  if (matrices_ && !is_decided) matrices_->expect(unit_of(visits));
  for (Pass& pass : passes_) {
    if (!pass.records) continue;
    pass.order.clear();
    for (const Visit& visit : visits) {
      if (access_of(visit, pass.kind) != Access::kNone) append_to(pass, visit, is_decided);
      pass.ends[static_cast<std::size_t>(visit.group)] = pass.order.size();
    }
    pass.records->announce(pass.order);
  }
}

/// Appends the records of a visit to a pass. The masters of all matrices are included, so that all ranks read and write
/// records in the same way.
void Update::append_to(Pass& pass, const Visit& visit, bool is_decided) const {
  const FlatGroup& flat = *group_of(visit).group;
  const auto append = [&](Extent run) { append_records(flat, pass.kind, run, direction_of(visit), pass.order); };
  if (!is_decided || visit.work == VisitWork::kReadMasters) return append(flat.optimizer_part);
  for_runs(visit, [&](const Run& run) { append(run.extent); });
}

void Update::end_pass() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->flush();
  }
}

bool Update::is_updated(const Visit& visit) const {
  const Group& group = group_of(visit);
  return std::ranges::any_of(std::span(runs_).subspan(group.begin, group.end - group.begin), &Run::is_updated);
}

void Update::make(const Visit& visit) {
  const FlatGroup& flat = *group_of(visit).group;
  switch (visit.work) {
    case VisitWork::kMeasure:
    case VisitWork::kLayerUpdates:
      layers_->begin(flat);
      return for_slices(visit, [&](const OptimizerSlice& slice, const Run& run) {
        if (run.is_updated) layers_->measure(flat, slice, elements_.scalars_of(rates_, run), run.group);
      });
    case VisitWork::kDirections:
      return for_slices(visit, [&](const OptimizerSlice& slice, const Run& run) {
        if (run.is_updated)
          matrices_->rule().make_directions(flat, slice, elements_.scalars_of(rates_, run), run.group);
      });
    case VisitWork::kReadMasters:
      return;  // `exchange` makes this pass
    case VisitWork::kUpdate:
      for_slices(visit, [&](const OptimizerSlice& slice, const Run& run) { update_run(flat, slice, run); });
      return pass_over_unused(visit);
    case VisitWork::kSwapAverages:
      return for_slices(
          visit, [&](const OptimizerSlice& slice, const Run& run) { optimizer_of(flat, run).swap_average(slice); });
  }
}

/// Skips records that a visit does not use. If units are updated in backward, records are announced before it is known
/// which parameters are used.
void Update::pass_over_unused(const Visit& visit) {
  if (!updates_in_backward()) return;
  for (const Pass& pass : passes_) {
    if (pass.records)
      pass.records->announce(std::span(pass.order).subspan(pass.ends[static_cast<std::size_t>(visit.group)]));
  }
}

void Update::update_run(const FlatGroup& group, const OptimizerSlice& slice, const Run& run) const {
  if (layers_ && run.is_updated) return layers_->step(group, slice, elements_.scalars_of(rates_, run), run.group);
  naming("unit", group.unit->name, [&] { elements_.update(optimizer_of(group, run), slice, rates_, run); });
}

const Optimizer& Update::optimizer_of(const FlatGroup& group, const Run& run) const {
  return group.matrices.empty() ? elements_.optimizer_of(run) : matrices_->rule().optimizer_of(run.group);
}

void Update::agree_on_norms() { layers_->agree(unit_under_way(), squares_, rates_.gradient_scale); }

void Update::exchange(std::span<const Visit> visits) {
  const auto visit_masters = [&](const FlatGroup& group, c10::function_ref<void(const StateView&)> visit) {
    const Visit& first = visits.front();  // the fields that all visits share
    if (first.parameters == Access::kNone && first.states == Access::kNone)
      return visit(states_in_memory(group, group.optimizer_part));
    for_each_state(group, kind_of(first), group.optimizer_part, StateUse::kRead, visit);
  };
  const MatrixUpdate::OfStep step{learning_rates_, rates_, steps_, used_};
  matrices_->exchange(unit_under_way(), &step, visit_masters);
}

double Update::communication_seconds() const {
  return publication_seconds() + (matrices_ ? matrices_->seconds() : 0) + (layers_ ? layers_->seconds() : 0);
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

}  // namespace tessera
