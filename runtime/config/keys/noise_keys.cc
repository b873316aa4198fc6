#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {

std::vector<StrategyKey> noise_keys() {
  return {
      {.field = integer_field(AT(noise_scale.every), {0, kMany}, "steps"),
       .example_json = "50",
       .doc = "Every so many steps the noise of gradients is measured: tr(Sigma) / norm(G)^2 (arXiv 1812.06162, "
              "appendix A), which is about the batch up to which larger batches save steps. It comes from the norms of "
              "the ranks' own gradients and of their mean; one rank compares its first microbatches with all of them. "
              "StepResult and metrics have it (docs/metrics.md). 0: never.",
       .cost = "In a step that measures, gradients are squared while they are copied into buckets. Every step sends 24 "
               "bytes more with what ranks agree on. No other step does more."},
      {.field = number_field(AT(noise_scale.smoothing), {0, 1, false, true}),
       .example_json = "0.99",
       .doc = "After a measurement norm(G)^2 and tr(Sigma) are each so much of what they were, and for the rest what "
              "was measured.",
       .cost = "Larger: less noise, and it follows the training later.",
       .only_if = when_above_0(AT(noise_scale.every))},
  };
}

}  // namespace tessera
