#pragma once

#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

/// SpikeConfig (tessera/strategy.h) as plain data.
struct SpikeRule {
  double factor = 2.0;
  std::int32_t window = 0;  ///< number of losses whose median is taken; 0: there is no search for spikes
};

/// State that stays from step to step. The losses of the window are kept separately, in a ring of `window` numbers.
struct SpikeState {
  std::int32_t count = 0;     ///< number of losses in the ring
  std::int32_t next = 0;      ///< index of the next loss in the ring
  std::int64_t in_a_row = 0;  ///< number of spikes in a row up to the latest step
  double median = 0;          ///< median with which the latest loss was compared; 0 while the window is not full
};

enum class SpikeVerdict : std::int32_t {
  kNone,
  kSpike,     ///< the step is to be skipped
  kChanged,   ///< the loss is a spike, but the losses before it were spikes too, so the window begins again
  kNegative,  ///< error: the loss is below 0, so it cannot be compared with the median
};

/// Returns the verdict on a step's loss. If a GPU trains, the device calls this function, with the same bits. `median`:
/// the median of the full window; while the window is not full, the number is not used.
TESSERA_ALWAYS_INLINE SpikeVerdict spike_verdict(const SpikeRule& rule, const SpikeState& state, double median,
                                                 double loss) {
  if (rule.window == 0) return SpikeVerdict::kNone;
  if (loss < 0) return SpikeVerdict::kNegative;
  if (state.count < rule.window || !(loss > rule.factor * median)) return SpikeVerdict::kNone;
  const std::int64_t most = rule.window < 2 ? 1 : rule.window / 2;
  return state.in_a_row < most ? SpikeVerdict::kSpike : SpikeVerdict::kChanged;
}

/// Adds a step's loss to the state. `losses`: the ring of losses [window].
TESSERA_ALWAYS_INLINE void note_loss(const SpikeRule& rule, SpikeState& state, double* losses, SpikeVerdict verdict,
                                     double median, double loss) {
  if (rule.window == 0) return;
  state.median = state.count == rule.window ? median : 0;
  if (verdict == SpikeVerdict::kSpike) ++state.in_a_row;
  if (verdict == SpikeVerdict::kSpike || verdict == SpikeVerdict::kNegative) return;
  if (verdict == SpikeVerdict::kChanged) state.count = state.next = 0;
  state.in_a_row = 0;
  if (loss - loss != 0.0) return;  // this loss is not finite
  losses[state.next] = loss;
  state.next = (state.next + 1) % rule.window;
  if (state.count < rule.window) ++state.count;
}

/// Returns the median of an even number of losses, given the two losses in the middle.
TESSERA_ALWAYS_INLINE double median_between(double below, double above) { return below + (above - below) / 2; }

}  // namespace tessera
