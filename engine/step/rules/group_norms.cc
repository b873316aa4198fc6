#include "engine/step/rules/group_norms.h"

#include <cmath>

#include "engine/step/agree/gradient_norm.h"
#include "engine/step/rules/layer_norms.h"

namespace tessera {

GroupNorms::GroupNorms(const FlatGroup& group)
    : totals_(layer_meeting({&group}, /*parts=*/1).totals),
      numel_(static_cast<std::uint64_t>(group.layout.numel())),
      weights_(kind_of(group)),
      updates_(kind_of(group)) {}

GroupNorms::Kind GroupNorms::kind_of(const FlatGroup& group) {
  return {NormSums(norm_runs(group, {0, group.layout.numel()})), std::vector<double>(group.parameters.size())};
}

void GroupNorms::begin() {
  weights_.sums.reset();
  updates_.sums.reset();
}

void GroupNorms::add(Kind& kind, std::int64_t first, std::span<const float> values) {
  kind.sums.skip_to(static_cast<std::uint64_t>(first));
  kind.sums.add(values);
}

void GroupNorms::end() {
  for (Kind* const kind : {&weights_, &updates_}) {
    kind->sums.skip_to(numel_);
    const double* const sums = kind->sums.sums().data();
    totals_.add_up({&sums, 1}, kind->squares);
  }
}

LayerNormPair GroupNorms::of(std::size_t i) const {
  return {std::sqrt(weights_.squares[i]), std::sqrt(updates_.squares[i])};
}

}  // namespace tessera
