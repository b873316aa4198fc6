#include "engine/step/agree/loss_spikes.h"

#include <c10/util/StringUtil.h>

#include <algorithm>

#include "runtime/base/log.h"
#include "tessera/error.h"

namespace tessera {

LossSpikes::LossSpikes(const SpikeConfig& config)
    : rule_{config.factor, static_cast<std::int32_t>(config.window)},
      losses_(static_cast<std::size_t>(config.window)),
      sorted_(losses_.size()) {}

double LossSpikes::median() {
  if (state_.count < rule_.window) return 0;
  sorted_ = losses_;  // sizes are equal: nothing is allocated
  const auto middle = sorted_.begin() + static_cast<std::ptrdiff_t>(sorted_.size() / 2);
  std::nth_element(sorted_.begin(), middle, sorted_.end());
  if (sorted_.size() % 2 == 1) return *middle;
  return median_between(*std::max_element(sorted_.begin(), middle), *middle);
}

SpikeHistory LossSpikes::history() const {
  SpikeHistory history{{}, state_.in_a_row};
  const std::int32_t oldest = state_.next + rule_.window - state_.count;
  for (std::int32_t i = 0; i < state_.count; ++i) {
    history.losses.push_back(losses_[static_cast<std::size_t>((oldest + i) % rule_.window)]);
  }
  return history;
}

void LossSpikes::restore(const SpikeHistory& history) {
  state_ = {};
  const std::size_t left_out = history.losses.size() - std::min(history.losses.size(), losses_.size());
  for (std::size_t i = left_out; i < history.losses.size(); ++i) {
    note_loss(rule_, state_, losses_.data(), SpikeVerdict::kNone, 0, history.losses[i]);
  }
  state_.median = 0;
  state_.in_a_row = history.spikes_in_a_row;
}

void report_spike(const SpikeConfig& config, SpikeVerdict verdict, std::int64_t step, double loss, double median) {
  if (verdict == SpikeVerdict::kNone) return;
  if (verdict == SpikeVerdict::kNegative) {
    throw Error(
        ExitCode::kConfig,
        c10::str(
            "step ", step, ": /on_spike/action: the loss is ", loss,
            ", and one that may be negative has no median to be far above of. [T0279] hint: leave \"on_spike\" out"));
  }
  log_warning(c10::str("step ", step, ": the loss ", loss, " is above ", config.factor, " times ", median,
                       ", the median of the last ", config.window, " steps' losses",
                       verdict == SpikeVerdict::kSpike
                           ? "; the step is skipped on all ranks"
                           : ", and so were those of the steps before: the loss has changed for good, so the step "
                             "is made, and the window begins anew"));
}

}  // namespace tessera
