#include "engine/asynchronous/shard_update.h"

#include "engine/asynchronous/compensate.h"
#include "engine/memory/state_views.h"

namespace tessera {

void ShardUpdate::apply(const FlatGroup& group, const PushedShard& shard, const ElementUpdate& rule,
                        const PushRates& with, std::int64_t age) {
  const float younger = config_.scale == AgeScale::kInverse ? 1.0F / static_cast<float>(1 + age) : 1.0F;
  runs_.clear();
  rule.find_runs(group, shard.view.optimizer_part, with.used, shard.counts, runs_);
  for (const UpdateRun& run : runs_) {
    UpdateRates rates = with.rates;
    rates.gradient_scale = compensated(shard, run.extent, rates.gradient_scale) * younger;
    rule.update(rule.optimizer_of(run), optimizer_slice(shard.view, states_in_memory(shard.view, run.extent)), rates,
                run);
  }
}

/// Compensates the gradients of a run for their delay, and returns the factor by which the gradients must still be
/// multiplied.
float ShardUpdate::compensated(const PushedShard& shard, Extent run, float scale) const {
  const DelayCompensationConfig& delay = config_.delay_compensation;
  if (delay.lambda == 0) return scale;
  const FlatGroup& view = shard.view;
  const std::int64_t in_shard = run.offset - view.optimizer_part.offset;
  const DelayCompensation with{reinterpret_cast<const float*>(view.shard) + in_shard, shard.pulled + in_shard,
                               static_cast<float>(delay.lambda)};
  float* const gradients = view.gradient + (run.offset - view.gradient_part.offset);
  if (delay.adaptive) {
    compensate_adaptively(
        gradients, run.numel, scale, with,
        {shard.mean_squares + in_shard, static_cast<float>(delay.decay), static_cast<float>(1.0 - delay.decay)});
  } else {
    compensate(gradients, run.numel, scale, with);
  }
  return 1.0F;
}

}  // namespace tessera
