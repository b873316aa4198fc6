#include "engine/asynchronous/shard_update.h"

#include <algorithm>

#include "engine/asynchronous/compensate.h"
#include "engine/memory/state_views.h"
#include "engine/step/rules/naming.h"
#include "sharding/layout/matrix_deal.h"

namespace tessera {
namespace {

/// The numbers of one kind that a part of a shard has.
struct PartNumbers {
  float* data;
  Extent part;
};

PartNumbers masters_of(const FlatGroup& part) { return {reinterpret_cast<float*>(part.shard), part.optimizer_part}; }

PartNumbers tensor_states_of(const FlatGroup& part) { return {part.of_tensors.data, part.of_tensors.part}; }

/// All numbers of a run of a shard, together. If one part has all of them, they are used where they lie. Otherwise they
/// are copied to the front of `work`, and `work` then begins behind them. `write_back` copies them back to the parts.
class JoinedRun {
 public:
  using Find = PartNumbers (*)(const FlatGroup&);
  JoinedRun(std::span<const FlatGroup> parts, Find find, Extent run, std::span<float>& work)
      : parts_(parts), find_(find), run_(run) {
    for (const FlatGroup& part : parts) {
      const PartNumbers numbers = find(part);
      if (intersect(run, numbers.part) == run) values_ = {numbers.data + (run.offset - numbers.part.offset), count()};
    }
    if (run.numel == 0 || !values_.empty()) return;
    is_copied_ = true;
    values_ = work.first(count());
    work = work.subspan(static_cast<std::size_t>(MatrixDeal::in_whole_lines(run.numel)));
    copy([](float* there, float* here, std::size_t n) { std::copy_n(there, n, here); });
  }

  std::span<float> values() const { return values_; }
  void write_back() const {
    if (is_copied_) copy([](float* there, const float* here, std::size_t n) { std::copy_n(here, n, there); });
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(run_.numel); }
  template <class Copy>
  void copy(const Copy& each) const {
    for (const FlatGroup& part : parts_) {
      const PartNumbers numbers = find_(part);
      const Extent piece = intersect(run_, numbers.part);
      if (piece.numel == 0) continue;
      each(numbers.data + (piece.offset - numbers.part.offset), values_.data() + (piece.offset - run_.offset),
           static_cast<std::size_t>(piece.numel));
    }
  }

  const std::span<const FlatGroup> parts_;
  const Find find_;
  const Extent run_;
  std::span<float> values_;
  bool is_copied_ = false;
};

}  // namespace

void ShardUpdate::apply(const FlatGroup& group, const PushedShard& shard, const ShardRule& rule, const PushRates& with,
                        std::int64_t age) {
  const std::int64_t begin = shard.parts.front().optimizer_part.offset, end = shard.parts.back().optimizer_part.end();
  runs_.clear();
  rule.elements().find_runs(group, {begin, end - begin}, with.used, shard.counts, runs_);
  Push push{group, shard, rule, with.rates, with.rates.gradient_scale, with.used};
  if (config_.delay_compensation.lambda != 0) push.rates.gradient_scale = 1.0F;
  if (config_.scale == AgeScale::kInverse) push.rates.gradient_scale *= 1.0F / static_cast<float>(1 + age);
  if (rule.layers()) return update_layers(push);
  group.matrices.empty() ? update_elements(push) : update_matrices(push);
}

/// Calls `body(part, piece, slice)` for each piece of a run that lies in one part, in the order of elements. `part`:
/// the part's index.
template <class Body>
void ShardUpdate::for_pieces(const Push& push, const Body& body) const {
  for (const UpdateRun& run : runs_) {
    for (std::size_t k = 0; k < push.shard.parts.size(); ++k) {
      const FlatGroup& part = push.shard.parts[k];
      UpdateRun piece = run;
      piece.extent = intersect(run.extent, part.optimizer_part);
      if (piece.extent.numel > 0) body(k, piece, optimizer_slice(part, states_in_memory(part, piece.extent)));
    }
  }
}

/// Scales the gradients of a run and compensates them for their delay, if the configuration has a lambda.
void ShardUpdate::compensate_piece(const Push& push, std::size_t part, Extent run) const {
  const DelayCompensationConfig& delay = config_.delay_compensation;
  if (delay.lambda == 0) return;
  const FlatGroup& view = push.shard.parts[part];
  const std::int64_t in_part = run.offset - view.optimizer_part.offset;
  const std::int64_t in_shard = run.offset - push.shard.parts.front().optimizer_part.offset;
  const DelayCompensation with{reinterpret_cast<const float*>(view.shard) + in_part, push.shard.pulled + in_shard,
                               static_cast<float>(delay.lambda)};
  float* const gradients = view.gradient + (run.offset - view.gradient_part.offset);
  if (delay.adaptive) {
    compensate_adaptively(gradients, run.numel, push.scale, with,
                          {push.shard.mean_squares[part] + in_part, static_cast<float>(delay.decay),
                           static_cast<float>(1.0 - delay.decay)});
  } else {
    compensate(gradients, run.numel, push.scale, with);
  }
}

void ShardUpdate::update_elements(const Push& push) const {
  const ElementUpdate& elements = push.rule.elements();
  for_pieces(push, [&](std::size_t part, const UpdateRun& run, const OptimizerSlice& slice) {
    compensate_piece(push, part, run.extent);
    naming("unit", push.group.unit->name, [&] { elements.update(elements.optimizer_of(run), slice, push.rates, run); });
  });
}

/// The update's norm is the norm of the direction under lamb, and the norm of the scaled gradient under lars.
void ShardUpdate::update_layers(const Push& push) const {
  const LayerwiseRule& layers = *push.rule.layers();
  const ElementUpdate& elements = push.rule.elements();
  GroupNorms& norms = *push.shard.norms;
  norms.begin();
  for_pieces(push, [&](std::size_t part, const UpdateRun& run, const OptimizerSlice& slice) {
    compensate_piece(push, part, run.extent);
    const auto add = [&](std::size_t begin, std::span<const float> weights, std::span<const float> directions) {
      const auto first = static_cast<std::int64_t>(slice.first_element + begin);
      norms.add_weights(first, weights);
      norms.add_update(first, directions.empty() ? slice.gradient.subspan(begin, weights.size()) : directions);
    };
    layers.optimizer_of(run.group).measure(elements.scalars_of(push.rates, run), slice,
                                           gradients_of(push.shard.parts[part], slice), add);
  });
  norms.end();
  for_pieces(push, [&](std::size_t, const UpdateRun& run, const OptimizerSlice& slice) {
    const double scale = layers.optimizer_of(run.group).makes_directions() ? 1.0 : push.rates.gradient_scale;
    layers.step(push.group, slice, elements.scalars_of(push.rates, run), run.group, [&](std::size_t i) {
      const LayerNormPair found = norms.of(i);
      return LayerNormPair{found.weights, found.update * scale};
    });
  });
}

void ShardUpdate::update_matrices(const Push& push) const {
  const MatrixRule& matrices = *push.rule.matrices();
  const ElementUpdate& elements = push.rule.elements();
  for_pieces(push, [&](std::size_t part, const UpdateRun& run, const OptimizerSlice& slice) {
    compensate_piece(push, part, run.extent);
    if (matrices.makes_directions())
      matrices.make_directions(push.shard.parts[part], slice, elements.scalars_of(push.rates, run), run.group);
  });
  for (std::size_t i = 0; i < push.group.parameters.size(); ++i) {
    if (push.used[i]) update_matrix(push, i);
  }
  if (!matrices.makes_directions()) return;
  for_pieces(push, [&](std::size_t, const UpdateRun& run, const OptimizerSlice& slice) {
    elements.update(matrices.optimizer_of(run.group), slice, push.rates, run);
  });
}

/// The rank's gradients of a group lie together, wherever its masters and states lie.
void ShardUpdate::update_matrix(const Push& push, std::size_t i) const {
  const MatrixRule& matrices = *push.rule.matrices();
  const FlatGroup& first = push.shard.parts.front();
  const Extent run = push.group.layout.extent(i);
  std::span<float> work = push.shard.work;
  WholeMatrix whole;
  whole.gradient = {first.gradient + (run.offset - first.gradient_part.offset), static_cast<std::size_t>(run.numel)};
  if (matrices.makes_directions()) {
    whole.work = work;
    return matrices.compute(push.group, i, whole, /*numbers=*/nullptr);
  }
  const JoinedRun masters(push.shard.parts, masters_of, run, work);
  const JoinedRun states(push.shard.parts, tensor_states_of, push.group.tensor_states.extent_of(i), work);
  whole.masters = masters.values();
  whole.states = states.values();
  const MatrixRule::Numbers numbers{push.rates, push.rule.lr_of(push.rates, push.group.parameters[i]),
                                    push.shard.counts[i]};
  matrices.compute(push.group, i, whole, &numbers);
  masters.write_back();
  states.write_back();
}

}  // namespace tessera
