#include "engine/step/gradient_norm.h"

namespace tessera {

GradientNorm::GradientNorm(const std::vector<std::unique_ptr<Unit>>& units) {
  for (const auto& unit : units) {
    first_of_unit_.push_back(entries_.size());
    for (const auto& group : unit->groups) {
      const NormTree tree(group->trainable ? NormTree::blocks_of(group->layout.numel()) : 0);
      entries_.push_back({tree, NormTree::Builder(tree)});
    }
  }
}

void GradientNorm::begin(const FlatGroup& group) {
  Entry& entry = this->entry(group);
  entry.builder.reset(static_cast<std::uint64_t>(group.gradient_part.offset) / NormTree::kBlockNumel);
  entry.seen = true;
}

void GradientNorm::visit(const FlatGroup& group, std::span<const float> values) { entry(group).builder.add(values); }

const NormTree::Builder& GradientNorm::sums_of(const FlatGroup& group) {
  Entry& entry = this->entry(group);
  if (!entry.seen) {
    begin(group);
    visit(group, {group.gradient, static_cast<std::size_t>(group.gradient_part.numel)});
  }
  return entry.builder;
}

void GradientNorm::reset() {
  for (Entry& entry : entries_) entry.seen = false;
}

}  // namespace tessera
