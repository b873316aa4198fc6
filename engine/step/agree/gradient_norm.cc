#include "engine/step/agree/gradient_norm.h"

#include <algorithm>

namespace tessera {

std::vector<NormRun> norm_runs(const FlatGroup& group, Extent part) {
  std::vector<NormRun> runs;
  for (std::size_t i = 0; i < group.parameters.size(); ++i) {
    const Extent whole = group.layout.extent(i), run = intersect(whole, part);
    if (run.numel == 0) continue;
    runs.push_back({.begin = static_cast<std::uint64_t>(run.offset - part.offset),
                    .numel = static_cast<std::uint64_t>(run.numel),
                    .first_block = static_cast<std::uint64_t>(run.offset - whole.offset) / kNormBlock,
                    .tensor = static_cast<std::uint32_t>(group.parameters[i].number),
                    .is_last = run.end() == whole.end()});
  }
  return runs;
}

NormTotals norm_totals(const std::vector<std::unique_ptr<Unit>>& units, std::size_t parts) {
  std::vector<std::uint64_t> numels;
  std::vector<std::vector<NormRun>> runs(parts);
  for (const auto& unit : units) {
    for (const auto& group : unit->groups) {
      for (const FlatParameter& parameter : group->parameters) {
        const auto number = static_cast<std::size_t>(parameter.number);
        numels.resize(std::max(numels.size(), number + 1));
        if (group->trainable) numels[number] = static_cast<std::uint64_t>(parameter.numel);
      }
      if (!group->trainable) continue;
      const std::int64_t numel = group->layout.numel() / static_cast<std::int64_t>(parts);
      for (std::size_t k = 0; k < parts; ++k) {
        const std::vector<NormRun> more = norm_runs(*group, {static_cast<std::int64_t>(k) * numel, numel});
        runs[k].insert(runs[k].end(), more.begin(), more.end());
      }
    }
  }
  return NormTotals(numels, runs);
}

GradientNorm::GradientNorm(const std::vector<std::unique_ptr<Unit>>& units) {
  for (const auto& unit : units) {
    first_of_unit_.push_back(entries_.size());
    for (const auto& group : unit->groups) {
      entries_.push_back(
          {NormSums(group->trainable ? norm_runs(*group, group->gradient_part) : std::vector<NormRun>())});
    }
  }
}

void GradientNorm::begin(const FlatGroup& group) {
  Entry& entry = this->entry(group);
  entry.sums.reset();
  entry.seen = true;
}

void GradientNorm::visit(const FlatGroup& group, std::span<const float> values) { entry(group).sums.add(values); }

const NormSums& GradientNorm::sums_of(const FlatGroup& group) {
  Entry& entry = this->entry(group);
  if (!entry.seen) {
    begin(group);
    visit(group, {group.gradient, static_cast<std::size_t>(group.gradient_part.numel)});
  }
  return entry.sums;
}

void GradientNorm::reset() {
  for (Entry& entry : entries_) entry.seen = false;
}

}  // namespace tessera
