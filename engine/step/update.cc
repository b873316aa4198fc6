#include "engine/step/update.h"

#include <algorithm>
#include <utility>

#include "engine/memory/records/gradient_records.h"
#include "runtime/config/strategy_names.h"
#include "tessera/span.h"

namespace tessera {

Update::Update(const StepContext& context)
    : units_(context.units),
      learning_rates_(context.strategy.optimizer),
      options_(context.strategy.optimizer),
      elements_(context.strategy, context.own_rules, learning_rates_),
      first_pass_(context.plan.first_pass_of_matrices()),
      passes_{Pass{StateKind::kParameters, context.memory.parameter_records.get()},
              Pass{StateKind::kMastersAndStates, context.memory.state_records.get()}},
      gradients_(context.memory.gradient_records.get()),
      publisher_(context.plan, context.axes, context.behind) {
  const OptimizerConfig& optimizer = context.strategy.optimizer;
  if (adapts_layers(optimizer.type)) layers_.emplace(context);
  if (!context.plan.matrices().batches().empty())
    matrices_.emplace(context, make_tensor_rule(optimizer, context.own_rules));
  std::size_t count = 0;
  first_of_unit_.push_back(0);
  for (const auto& unit : units_) {
    for (const auto& group : unit->groups) {
      if (!group->trainable) continue;
      groups_.push_back({group.get(), count});
      for (const FlatParameter& parameter : group->parameters) {
        if (!group->matrices.empty()) dealt_.emplace_back(count, parameter.group);
        ++count;
      }
    }
    first_of_unit_.push_back(groups_.size());
  }
  const auto matrices =
      std::ranges::stable_partition(groups_, [](const Group& group) { return group.group->matrices.empty(); });
  first_of_matrices_ = groups_.size() - matrices.size();
  steps_.resize(count, 0);
  runs_.reserve(count);
}

void Update::follow_options() {
  if (std::exchange(followed_, options_.version()) == options_.version()) return;
  elements_.follow(options_);
  if (matrices_) matrices_->follow(options_);
  if (layers_) layers_->follow(options_);
}

std::span<Update::Group> Update::groups_of(const Unit& unit) {
  const auto index = static_cast<std::size_t>(unit.index);
  const std::size_t begin = first_of_unit_[index];
  return std::span(groups_).subspan(begin, first_of_unit_[index + 1] - begin);
}

/// As if every parameter got a gradient, which is nearly always so.
void Update::expect(std::span<const int> order) {
  if (matrices_) matrices_->expect();
  for (Pass& pass : passes_) pass.order.clear();
  if (order.empty()) {
    // As update_with_matrices begins.
    const bool matrices_first = matrices_ && direction_ == Direction::kBackward;
    const Direction direction = std::exchange(direction_, matrices_ ? Direction::kForward : direction_);
    in_direction(matrices_first ? first_of_matrices_ : 0, groups_.size(), [&](std::size_t g) {
      announce(groups_[g], groups_[g].group->optimizer_part, matrices_ && g >= first_of_matrices_);
    });
    direction_ = direction;
  }
  for (const int unit : order) {
    for (Group& group : groups_of(*units_[static_cast<std::size_t>(unit)])) {
      announce(group, group.group->optimizer_part);
    }
  }
  begin_passes();
}

void Update::read_ahead() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->read_ahead();
  }
}

void Update::apply(const Rates& rates, const std::vector<char>& used, std::span<const double> squares) {
  const Span span("update");
  follow_options();
  publisher_.begin();
  runs_.clear();
  for (Group& group : groups_) find_runs(group, std::span(used).subspan(group.first_parameter));
  if (layers_) return update_layerwise(rates, squares);
  if (matrices_) return update_with_matrices(rates, used);
  announce_runs();
  begin_gradients();
  update_elements(rates);
  let_gradients_go();
  end_pass();
}

bool Update::needs_gradients(const Group& group) const {
  const auto runs = std::span(runs_).subspan(group.begin, group.end - group.begin);
  return std::ranges::any_of(runs, &Run::is_updated);
}

/// So that they are read ahead. Groups of one unit follow each other.
void Update::begin_gradients() {
  if (!gradients_) return;
  std::vector<int> order;
  for (const Group& group : groups_) {
    const int unit = group.group->unit->index;
    if (needs_gradients(group) && (order.empty() || order.back() != unit)) order.push_back(unit);
  }
  gradients_->begin_update(std::move(order));
}

void Update::hold_gradients(const Group& group) {
  Unit* const unit = group.group->unit;
  if (!gradients_ || held_ == unit || !needs_gradients(group)) return;
  let_gradients_go();
  gradients_->open(*unit, /*has_sum=*/true);
  held_ = unit;
}

void Update::let_gradients_go() {
  if (Unit* const unit = std::exchange(held_, nullptr)) gradients_->close(*unit, /*changed=*/false);
}

void Update::update_elements(const Rates& rates) {
  in_direction(0, first_of_matrices_, [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    hold_gradients(groups_[g]);
    visit_group(groups_[g], [&](const OptimizerSlice& slice, const Run& run) { update_run(flat, slice, rates, run); });
  });
}

/// Elements, and of matrices directions or masters, forward; then matrices backward. By turns elements come first, or last and backward: so
/// what lies on disk and was used last is used first.
void Update::update_with_matrices(const Rates& rates, const std::vector<char>& used) {
  const bool elements_first = direction_ == Direction::kForward;
  direction_ = Direction::kForward;
  announce_runs(elements_first ? 0 : first_of_matrices_, /*is_first=*/true);
  if (elements_first) update_elements(rates);
  const auto exchange = [&] {
    matrices_->exchange([&](std::size_t matrix) { return numbers_of(matrix, rates, used); },
                        [&](const FlatGroup& group, auto visit) { visit_masters(group, visit); });
  };
  const bool makes_directions = matrices_->makes_directions();
  makes_directions ? make_directions(rates) : exchange();
  end_records();
  direction_ = Direction::kBackward;
  announce_runs(elements_first ? first_of_matrices_ : 0);
  if (makes_directions) exchange();  // while records are read ahead
  in_direction(first_of_matrices_, groups_.size(), [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    visit_group(groups_[g], [&](const OptimizerSlice& slice, const Run& run) { update_run(flat, slice, rates, run); });
  });
  if (!elements_first) update_elements(rates);
  finish();
  direction_ = elements_first ? Direction::kBackward : Direction::kForward;
}

/// All of this rank's, so that what moves is the same on each.
void Update::visit_masters(const FlatGroup& group, c10::function_ref<void(const StateView&)> visit) const {
  const auto [in_parameters, in_records] = first_pass_;
  if (!in_parameters && !in_records) return visit(states_in_memory(group, group.optimizer_part));
  const StateKind kind = !in_parameters ? StateKind::kMastersAndStates
                         : in_records   ? StateKind::kAll
                                        : StateKind::kParameters;
  for_each_state(group, kind, group.optimizer_part, StateUse::kRead, visit);
}

/// In place of the gradients.
void Update::make_directions(const Rates& rates) {
  for (std::size_t g = first_of_matrices_; g < groups_.size(); ++g) {
    const FlatGroup& flat = *groups_[g].group;
    const auto visit = [&](const OptimizerSlice& slice, const Run& run) {
      if (run.is_updated) matrices_->make_directions(flat, slice, elements_.scalars_of(rates, run), run.group);
    };
    visit_runs_of(groups_[g], StateUse::kUpdateStates, visit, StateKind::kMastersAndStates);
  }
}

MatrixUpdate::Numbers Update::numbers_of(std::size_t matrix, const Rates& rates, const std::vector<char>& used) const {
  const auto [parameter, group] = dealt_[matrix];
  return MatrixUpdate::numbers_of(learning_rates_, rates, group, steps_[parameter], used[parameter] != 0);
}

/// Forward to measure, and backward to step: what lies on disk and was used last is used first.
void Update::update_layerwise(const Rates& rates, std::span<const double> squares) {
  direction_ = Direction::kForward;  // in which norms are added up
  announce_runs();
  for (const Group& group : groups_) {
    layers_->begin(*group.group);
    visit_runs_of(group, layers_->first_use(), [&](const OptimizerSlice& slice, const Run& run) {
      if (run.is_updated) layers_->measure(*group.group, slice, elements_.scalars_of(rates, run), run.group);
    });
  }
  layers_->agree(squares, rates.gradient_scale);
  end_records();
  if (alternates()) turn_round();
  announce_runs();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    visit_group(groups_[g], [&](const OptimizerSlice& slice, const Run& run) {
      if (!run.is_updated) return optimizer_of(flat, run).average(slice);
      layers_->step(flat, slice, elements_.scalars_of(rates, run), run.group);
    });
  });
  end_pass();
}

void Update::apply(Unit& unit, const Rates& rates, std::span<const char> used) {
  const Span span("update", unit.name);
  follow_options();
  publisher_.begin(unit);
  runs_.clear();
  for (Group& group : groups_of(unit)) {
    find_runs(group, used);
    used = used.subspan(group.group->parameters.size());
    visit_group(group,
                [&](const OptimizerSlice& slice, const Run& run) { update_run(*group.group, slice, rates, run); });
    for (std::size_t p = 0; p < passes_.size(); ++p) {
      if (passes_[p].records) passes_[p].records->pass(group.records_before[p]);
    }
  }
}

void Update::finish() {
  publisher_.finish();
  end_records();
}

void Update::end_records() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->end_pass();
  }
}

void Update::turn_round() {
  direction_ = direction_ == Direction::kForward ? Direction::kBackward : Direction::kForward;
}

void Update::swap_averages() {
  const Span span("averages");
  publisher_.begin();
  runs_.clear();
  const std::vector<char> unused(steps_.size());
  for (Group& group : groups_) find_runs(group, unused);
  announce_runs();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    visit_group(groups_[g],
                [&](const OptimizerSlice& slice, const Run& run) { optimizer_of(flat, run).swap_average(slice); });
  });
  end_pass();
}

/// Passes go forward and backward by turns, but where nothing lies in records and values are wanted in forward's order.
bool Update::alternates() const { return passes_[0].records || passes_[1].records || !publisher_.is_behind(); }

/// The next step goes the other way, but where gradients lie in records.
void Update::end_pass() {
  finish();
  if (!gradients_ && alternates()) turn_round();
}

/// Calls `visit(slice, run)` for a group's runs, in this step's direction, and publishes what became of them.
template <class Visit>
void Update::visit_group(const Group& group, const Visit& visit) {
  visit_runs_of(group, StateUse::kUpdate, visit);
  publisher_.publish(*group.group);
}

template <class Visit>
void Update::visit_runs_of(const Group& group, StateUse use, const Visit& visit, StateKind kind) {
  const FlatGroup& flat = *group.group;
  in_direction(group.begin, group.end, [&](std::size_t r) {
    const Run& run = runs_[r];
    for_each_state(
        flat, kind, run.extent, use, [&](const StateView& view) { visit(optimizer_slice(flat, view), run); },
        direction_);
  });
}

/// Calls `visit(i)` for begin <= i < end, in this step's direction.
template <class Visit>
void Update::in_direction(std::size_t begin, std::size_t end, const Visit& visit) const {
  for (std::size_t i = begin; i < end; ++i) visit(direction_ == Direction::kForward ? i : end - 1 - (i - begin));
}

void Update::find_runs(Group& group, std::span<const char> used) {
  group.begin = runs_.size();
  elements_.find_runs(*group.group, group.group->optimizer_part, used, steps_.data() + group.first_parameter, runs_);
  group.end = runs_.size();
}

/// So that they are read ahead.
void Update::announce_runs(std::size_t begin, bool is_first) {
  for (Pass& pass : passes_) pass.order.clear();
  in_direction(begin, groups_.size(), [&](std::size_t g) {
    const bool is_first_of_matrices = is_first && g >= first_of_matrices_;
    if (is_first_of_matrices && !matrices_->makes_directions())  // visit_masters
      return announce(groups_[g], groups_[g].group->optimizer_part, /*is_first=*/true);
    in_direction(groups_[g].begin, groups_[g].end,
                 [&](std::size_t r) { announce(groups_[g], runs_[r].extent, is_first_of_matrices); });
  });
  begin_passes();
}

void Update::announce(Group& group, Extent run, bool is_first) {
  for (std::size_t p = 0; p < passes_.size(); ++p) {
    Pass& pass = passes_[p];
    const bool is_in_first = pass.kind == StateKind::kParameters ? first_pass_.parameters : first_pass_.states;
    const bool is_visited = !is_first || is_in_first;
    if (pass.records && is_visited) append_records(*group.group, pass.kind, run, direction_, pass.order);
    group.records_before[p] = pass.order.size();
  }
}

void Update::begin_passes() {
  for (const Pass& pass : passes_) {
    if (pass.records) pass.records->begin_pass(pass.order);
  }
}

double Update::communication_seconds() const {
  return publisher_.seconds() + (matrices_ ? matrices_->seconds() : 0) + (layers_ ? layers_->seconds() : 0);
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

const Optimizer& Update::optimizer_of(const FlatGroup& group, const Run& run) const {
  return group.matrices.empty() ? elements_.optimizer_of(run) : matrices_->optimizer_of(run.group);
}

void Update::update_run(const FlatGroup& group, const OptimizerSlice& slice, const Rates& rates, const Run& run) const {
  elements_.update(optimizer_of(group, run), slice, rates, run);
}

}  // namespace tessera
