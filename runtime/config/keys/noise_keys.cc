#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {
namespace {

Condition where_measured() {
  return {
      "noise_scale.every above 0", {"/noise_scale/every"}, [](const Strategy& s) { return s.noise_scale.every > 0; }};
}

}  // namespace

std::vector<StrategyKey> noise_keys() {
  return {
      {.pointer = "/noise_scale/every",
       .field = integer_field(AT(noise_scale.every)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "50",
       .doc =
           "Every so many steps the noise of gradients is measured: tr(Sigma) / norm(G)^2 (arXiv 1812.06162, appendix "
           "A), which is about the batch up to which larger batches save steps. It comes from the norms of the "
           "ranks' own gradients and of their mean; one rank compares its first microbatches with all of them. "
           "StepResult and metrics have it (docs/metrics.md). 0: never.",
       .cost = "In a step that measures, gradients are squared while they are copied into buckets. Every step sends 24 "
               "bytes more with what ranks agree on. No other step does more."},
      {.pointer = "/noise_scale/smoothing",
       .field = number_field(AT(noise_scale.smoothing)),
       .range = {0, 1, false, true},
       .default_json = "0.9",
       .example_json = "0.99",
       .doc = "After a measurement norm(G)^2 and tr(Sigma) are each so much of what they were, and for the rest what "
              "was measured.",
       .cost = "Larger: less noise, and it follows the training later.",
       .only_if = where_measured()},
  };
}

}  // namespace tessera
