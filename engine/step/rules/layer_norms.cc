#include "engine/step/rules/layer_norms.h"

#include <algorithm>
#include <cmath>

#include "engine/step/agree/step_agreement.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

LayerNorms::LayerNorms(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement optimizer, const MeshAxes& axes,
                       bool of_updates)
    : units_(units),
      world_(axes.world),
      ranks_with_parts_(owners_of_parts(optimizer, axes)),
      totals_(norm_totals(units, ranks_with_parts_.size())),
      kinds_(of_updates ? 2 : 1),
      message_(totals_.most_sums() * kinds_.size()),
      messages_(message_.size() * static_cast<std::size_t>(world_->size())),
      parts_(ranks_with_parts_.size()) {
  for (Kind& kind : kinds_) kind.squares.resize(totals_.tensors());
  std::size_t groups = 0;
  for (const auto& unit : units) {
    first_of_unit_.push_back(groups);
    groups += unit->groups.size();
    for (const auto& group : unit->groups) {
      const auto runs = group->trainable ? norm_runs(*group, group->optimizer_part) : std::vector<NormRun>();
      for (Kind& kind : kinds_) kind.sums.emplace_back(runs);
    }
  }
}

NormSums& LayerNorms::sums_of(Kind& kind, const FlatGroup& group) {
  return kind.sums[first_of_unit_[static_cast<std::size_t>(group.unit->index)] + group.index];
}

void LayerNorms::begin(const FlatGroup& group) {
  for (Kind& kind : kinds_) sums_of(kind, group).reset();
}

void LayerNorms::add(Kind& kind, const FlatGroup& group, std::int64_t first, std::span<const float> values) {
  NormSums& sums = sums_of(kind, group);
  sums.skip_to(static_cast<std::uint64_t>(first - group.optimizer_part.offset));
  sums.add(values);
}

void LayerNorms::add_weights(const FlatGroup& group, std::int64_t first, std::span<const float> values) {
  add(kinds_[0], group, first, values);
}

void LayerNorms::add_update(const FlatGroup& group, std::int64_t first, std::span<const float> values) {
  add(kinds_[1], group, first, values);
}

void LayerNorms::agree() {
  if (message_.empty()) return;  // nothing trains
  const Span span("layer norms", {}, &seconds_);
  const std::size_t most = totals_.most_sums();
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    auto place = message_.begin() + static_cast<std::ptrdiff_t>(k * most);
    for_each_trainable(units_, [&](const FlatGroup& group) {
      NormSums& sums = sums_of(kinds_[k], group);
      sums.skip_to(static_cast<std::uint64_t>(group.optimizer_part.numel));
      place = std::ranges::copy(sums.sums(), place).out;
    });
  }
  throw_if_error(
      world_->all_gather("layer norms", message_.data(), messages_.data(), message_.size() * sizeof(double)).wait());
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      parts_[i] = messages_.data() + static_cast<std::size_t>(ranks_with_parts_[i]) * message_.size() + k * most;
    }
    totals_.add_up(parts_, kinds_[k].squares);
  }
}

double LayerNorms::weights(std::int64_t number) const {
  return std::sqrt(kinds_[0].squares[static_cast<std::size_t>(number)]);
}

double LayerNorms::update(std::int64_t number) const {
  return std::sqrt(kinds_[1].squares[static_cast<std::size_t>(number)]);
}

}  // namespace tessera
