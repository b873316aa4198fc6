#include "engine/step/rules/layer_norms.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "engine/step/agree/step_agreement.h"
#include "runtime/border/throw.h"
#include "tessera/span.h"

namespace tessera {

LayerMeeting layer_meeting(std::vector<const FlatGroup*> groups, std::size_t parts) {
  std::vector<std::size_t> numbers;
  std::vector<std::uint64_t> numels;
  std::vector<std::vector<NormRun>> runs(parts);
  for (const FlatGroup* group : groups) {
    const std::size_t first = numbers.size();
    for (const FlatParameter& parameter : group->parameters) {
      numbers.push_back(static_cast<std::size_t>(parameter.number));
      numels.push_back(static_cast<std::uint64_t>(parameter.numel));
    }
    const auto place_of = [&](std::uint32_t number) {
      const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(first);
      return static_cast<std::uint32_t>(std::find(begin, numbers.end(), number) - numbers.begin());
    };
    const std::int64_t numel = group->layout.numel() / static_cast<std::int64_t>(parts);
    for (std::size_t k = 0; k < parts; ++k) {
      for (NormRun run : norm_runs(*group, {static_cast<std::int64_t>(k) * numel, numel})) {
        run.tensor = place_of(run.tensor);
        runs[k].push_back(run);
      }
    }
  }
  NormTotals totals(numels, runs);
  return {std::move(groups), std::move(numbers), std::move(totals)};
}

std::vector<LayerMeeting> layer_meetings(const std::vector<std::unique_ptr<Unit>>& units, std::size_t parts,
                                         bool by_unit) {
  std::vector<LayerMeeting> meetings;
  std::vector<const FlatGroup*> train;
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      if (group->trainable) train.push_back(group.get());
    }
    if (by_unit) meetings.push_back(layer_meeting(std::exchange(train, {}), parts));
  }
  if (!by_unit) meetings.push_back(layer_meeting(std::move(train), parts));
  return meetings;
}

LayerNorms::LayerNorms(const std::vector<std::unique_ptr<Unit>>& units, AxisPlacement optimizer, const MeshAxes& axes,
                       Options options)
    : world_(axes.world),
      ranks_with_parts_(owners_of_parts(optimizer, axes)),
      kinds_(options.of_updates ? 2 : 1),
      meetings_(layer_meetings(units, ranks_with_parts_.size(), options.by_unit)),
      parts_(ranks_with_parts_.size()) {
  std::size_t groups = 0, most_numbers = 0, most_sums = 0, most_tensors = 0;
  for (const auto& unit : units) {
    first_of_unit_.push_back(groups);
    groups += unit->groups.size();
    for (const auto& group : unit->groups) {
      const auto runs = group->trainable ? norm_runs(*group, group->optimizer_part) : std::vector<NormRun>();
      for (Kind& kind : kinds_) kind.sums.emplace_back(runs);
      for (const FlatParameter& parameter : group->parameters)
        most_numbers = std::max(most_numbers, static_cast<std::size_t>(parameter.number) + 1);
    }
  }
  for (const LayerMeeting& meeting : meetings_) {
    most_sums = std::max(most_sums, meeting.totals.most_sums());
    most_tensors = std::max(most_tensors, meeting.numbers.size());
  }
  for (Kind& kind : kinds_) kind.squares.resize(most_numbers);
  message_.resize(most_sums * kinds_.size());
  messages_.resize(message_.size() * static_cast<std::size_t>(world_->size()));
  squares_.resize(most_tensors);
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

void LayerNorms::agree(std::optional<std::int32_t> unit) {
  const LayerMeeting& meeting = meetings_[static_cast<std::size_t>(unit.value_or(0))];
  const std::size_t most = meeting.totals.most_sums(), length = most * kinds_.size();
  if (length == 0) return;  // nothing trains
  const Span span("layer norms", {}, &seconds_);
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    auto place = message_.begin() + static_cast<std::ptrdiff_t>(k * most);
    for (const FlatGroup* group : meeting.groups) {
      NormSums& sums = sums_of(kinds_[k], *group);
      sums.skip_to(static_cast<std::uint64_t>(group->optimizer_part.numel));
      place = std::ranges::copy(sums.sums(), place).out;
    }
  }
  throw_if_error(world_->all_gather("layer norms", message_.data(), messages_.data(), length * sizeof(double)).wait());
  const std::span<double> squares = std::span(squares_).first(meeting.numbers.size());
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    for (std::size_t i = 0; i < parts_.size(); ++i)
      parts_[i] = messages_.data() + static_cast<std::size_t>(ranks_with_parts_[i]) * length + k * most;
    meeting.totals.add_up(parts_, squares);
    for (std::size_t i = 0; i < squares.size(); ++i) kinds_[k].squares[meeting.numbers[i]] = squares[i];
  }
}

double LayerNorms::weights(std::int64_t number) const {
  return std::sqrt(kinds_[0].squares[static_cast<std::size_t>(number)]);
}

double LayerNorms::update(std::int64_t number) const {
  return std::sqrt(kinds_[1].squares[static_cast<std::size_t>(number)]);
}

}  // namespace tessera
