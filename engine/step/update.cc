#include "engine/step/update.h"

#include <algorithm>
#include <cmath>

#include "runtime/config/strategy_names.h"
#include "tessera/span.h"

namespace tessera {

Update::Update(const std::vector<std::unique_ptr<Unit>>& units, const Strategy& strategy, const MemoryPlan& plan,
               const MeshAxes& axes, const TrainingMemory& memory,
               const std::shared_ptr<const ElementwiseOptimizer>& own_rule)
    : units_(units),
      deal_(plan.matrices()),
      lr_adjustment_(strategy.optimizer.muon.adjust_lr),
      learning_rates_(strategy.optimizer),
      averages_(strategy.ema.decay > 0.0),
      passes_{Pass{StateKind::kParameters, memory.parameter_records.get()},
              Pass{StateKind::kMastersAndStates, memory.state_records.get()}},
      publisher_(plan, axes) {
  static_assert(FlatParameter::kNoGroup + 1 == 0);
  const bool has_matrices = !deal_.batches().empty();
  const auto add = [&](const OptimizerConfig& config) {
    optimizers_.push_back(make_optimizer(config, strategy.ema, own_rule));
    if (has_matrices) matrix_optimizers_.push_back(std::make_unique<MuonOptimizer>(config, strategy.ema));
  };
  add(strategy.optimizer);
  for (const ParameterGroup& group : strategy.optimizer.groups) add(config_of(strategy.optimizer, group));
  if (adapts_layers(strategy.optimizer.type)) layers_.emplace(units, strategy, plan, axes);
  if (has_matrices) exchange_.emplace(deal_, units, memory.matrices, strategy.optimizer.muon.ns_steps, axes.world);
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

void Update::apply(const Rates& rates, const std::vector<char>& used, std::span<const double> squares) {
  const Span span("update");
  runs_.clear();
  for (Group& group : groups_) find_runs(group, std::span(used).subspan(group.first_parameter));
  if (layers_) return update_layerwise(rates, squares);
  announce_runs();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    if (!flat.matrices.empty()) return;
    visit_group(groups_[g], [&](const OptimizerSlice& slice, const Run& run) { update_run(flat, slice, rates, run); });
  });
  if (exchange_) update_matrices(rates, used);
  end_pass();
}

/// Forward to measure, and backward to step: what lies on disk and was used last is used first.
void Update::update_layerwise(const Rates& rates, std::span<const double> squares) {
  direction_ = Direction::kForward;  // in which norms are added up
  announce_runs();
  for (const Group& group : groups_) {
    layers_->begin(*group.group);
    visit_runs_of(group, layers_->first_use(), [&](const OptimizerSlice& slice, const Run& run) {
      if (run.is_updated) layers_->measure(*group.group, slice, scalars_of(rates, run), run.group);
    });
  }
  layers_->agree(squares, rates.gradient_scale);
  end_records();
  turn_round();
  announce_runs();
  in_direction(0, groups_.size(), [&](std::size_t g) {
    const FlatGroup& flat = *groups_[g].group;
    visit_group(groups_[g], [&](const OptimizerSlice& slice, const Run& run) {
      if (!run.is_updated) return optimizer_of(flat, run).average(slice);
      layers_->step(flat, slice, scalars_of(rates, run), run.group);
    });
  });
  end_pass();
}

/// Batch by batch: momenta; exchange; masters.
void Update::update_matrices(const Rates& rates, const std::vector<char>& used) {
  for (const MatrixBatch& batch : deal_.batches()) {
    const auto for_groups = [&](const auto& visit) {
      for (std::size_t u = batch.begin_unit; u < batch.end_unit; ++u) {
        for (Group& group : groups_of(*units_[u])) {
          if (!group.group->matrices.empty()) visit(group);
        }
      }
    };
    for_groups([&](const Group& group) { make_directions(group, rates); });
    exchange_->run(batch, [&](const DealtMatrix& matrix) { return factor_of(matrix, used); });
    for_groups([&](const Group& group) {
      visit_group(group,
                  [&](const OptimizerSlice& slice, const Run& run) { update_run(*group.group, slice, rates, run); });
    });
  }
}

/// In place of the gradients.
void Update::make_directions(const Group& group, const Rates& rates) {
  visit_runs_of(group, StateUse::kUpdate, [&](const OptimizerSlice& slice, const Run& run) {
    if (!run.is_updated) return;
    matrix_optimizers_[run.group + 1]->direction(scalars_of(rates, run), slice, gradients_of(*group.group, slice));
  });
}

float Update::factor_of(const DealtMatrix& matrix, const std::vector<char>& used) {
  const Group& group = groups_of(*units_[matrix.unit])[matrix.group];
  if (!used[group.first_parameter + matrix.tensor]) return 0;
  const std::vector<std::int64_t>& sizes = group.group->parameters[matrix.tensor].sizes;
  const auto rows = static_cast<double>(sizes[0]), columns = static_cast<double>(sizes[1]);
  const bool is_original = lr_adjustment_ == MuonLrAdjustment::kOriginal;
  return static_cast<float>(is_original ? std::sqrt(std::max(1.0, rows / columns))
                                        : 0.2 * std::sqrt(std::max(rows, columns)));
}

void Update::apply(const Unit& unit, const Rates& rates, std::span<const char> used) {
  const Span span("update", unit.name);
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

/// The next step goes the other way.
void Update::end_pass() {
  finish();
  turn_round();
}

/// Calls `visit(slice, run)` for a group's runs, in this step's direction, and publishes what became of them.
template <class Visit>
void Update::visit_group(const Group& group, const Visit& visit) {
  visit_runs_of(group, StateUse::kUpdate, visit);
  publisher_.publish(*group.group);
}

template <class Visit>
void Update::visit_runs_of(const Group& group, StateUse use, const Visit& visit) {
  const FlatGroup& flat = *group.group;
  in_direction(group.begin, group.end, [&](std::size_t r) {
    const Run& run = runs_[r];
    for_each_state(
        flat, StateKind::kAll, run.extent, use, [&](const StateView& view) { visit(optimizer_slice(flat, view), run); },
        direction_);
  });
}

/// Calls `visit(i)` for begin <= i < end, in this step's direction.
template <class Visit>
void Update::in_direction(std::size_t begin, std::size_t end, const Visit& visit) const {
  for (std::size_t i = begin; i < end; ++i) visit(direction_ == Direction::kForward ? i : end - 1 - (i - begin));
}

/// Neighbours that have taken part in equally many steps are one run, with the padding up to the next run. `used`: of the group's
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
    const std::int64_t begin = i == 0 ? 0 : flat.layout.extent(i).offset;
    const std::int64_t next = end == count ? flat.layout.numel() : flat.layout.extent(end).offset;
    const Extent run = intersect({begin, next - begin}, flat.optimizer_part);
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

double Update::communication_seconds() const {
  return publisher_.seconds() + (exchange_ ? exchange_->seconds() : 0) + (layers_ ? layers_->seconds() : 0);
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
  if (group.matrices.empty()) return *optimizers_[run.group + 1];
  return *matrix_optimizers_[run.group + 1];
}

StepScalars Update::scalars_of(const Rates& rates, const Run& run) const {
  const double lr = learning_rates_.of(rates.lr, run.group);
  return {rates.gradient_scale, rates.clip_value, static_cast<float>(lr), run.step};
}

void Update::update_run(const FlatGroup& group, const OptimizerSlice& slice, const Rates& rates, const Run& run) const {
  const Optimizer& optimizer = optimizer_of(group, run);
  if (!run.is_updated) return optimizer.average(slice);
  optimizer.step(scalars_of(rates, run), slice);
}

}  // namespace tessera
