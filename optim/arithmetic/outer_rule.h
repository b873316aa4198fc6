#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/arithmetic/instruction_set.h"

namespace tessera {

// This file has the arithmetic of outer steps ("sync", engine/step/outer_steps.h), for one pass and one element. Loops
// on the host (optim/outer_pass.h) and kernels of a GPU (optim/cuda/device_outer.h) use this code, so both give the
// same bits.

/// The kinds of passes; value, w, m and o are elements of OuterRun's `values`, `weights`, `momentum` and `own`.
enum class OuterWork : std::uint8_t {
  kTake,       ///< w = value
  kGradients,  ///< value = w - o, this replica's outer gradient
  kMean,       ///< value = value / replicas
  /// SGD with Nesterov's momentum, as in torch::optim::SGD; value is the mean outer gradient g: m = momentum m + g;  w
  /// = w - lr (g + momentum m);  value = w
  kStep,
  kMix,    ///< value = mix value + (1 - mix) w
  kScale,  ///< value = factor value; 0 if the factor is 0, whatever the value was
};

/// The numbers of SyncConfig (tessera/strategy.h) in the form that passes use.
struct OuterRule {
  float lr = 0, momentum = 0, mix = 0;
  float replicas = 1;  ///< number of replicas
};

/// One pass over `numel` elements. All memory belongs to the device that computes. A pass uses only the fields that
/// OuterWork names.
struct OuterRun {
  OuterWork work = OuterWork::kMean;
  std::size_t numel = 0;
  float* values = nullptr;
  const float* own = nullptr;  ///< kGradients: this replica's weights; may be `values`
  float* weights = nullptr;    ///< outer weights
  float* momentum = nullptr;   ///< momentum of the outer optimizer
  OuterRule rule;
  float factor = 1;  ///< the factor of kScale
};

/// Computes element `i` of a pass. Every operation is rounded separately, so this code must be compiled without
/// contraction of a * b + c.
template <OuterWork kWork>
TESSERA_ALWAYS_INLINE void outer_element(const OuterRun& run, std::size_t i) {
  const OuterRule& rule = run.rule;
  float& value = run.values[i];
  if constexpr (kWork == OuterWork::kTake) run.weights[i] = value;
  if constexpr (kWork == OuterWork::kGradients) value = run.weights[i] - run.own[i];
  if constexpr (kWork == OuterWork::kMean) value = value / rule.replicas;
  if constexpr (kWork == OuterWork::kStep) {
    const float gradient = value;
    const float momentum = rule.momentum * run.momentum[i] + gradient;
    const float weight = run.weights[i] - rule.lr * (gradient + rule.momentum * momentum);
    run.momentum[i] = momentum;
    run.weights[i] = value = weight;
  }
  if constexpr (kWork == OuterWork::kMix) value = rule.mix * value + (1 - rule.mix) * run.weights[i];
  if constexpr (kWork == OuterWork::kScale) value = run.factor == 0 ? 0 : run.factor * value;
}

/// Returns `call.template operator()<work>()`: the loop or kernel for a kind of pass that is known only at run time.
template <class Call>
auto with_outer_work(OuterWork work, const Call& call) {
  switch (work) {
    case OuterWork::kTake:
      return call.template operator()<OuterWork::kTake>();
    case OuterWork::kGradients:
      return call.template operator()<OuterWork::kGradients>();
    case OuterWork::kMean:
      return call.template operator()<OuterWork::kMean>();
    case OuterWork::kStep:
      return call.template operator()<OuterWork::kStep>();
    case OuterWork::kMix:
      return call.template operator()<OuterWork::kMix>();
    case OuterWork::kScale:
      break;
  }
  return call.template operator()<OuterWork::kScale>();
}

}  // namespace tessera
