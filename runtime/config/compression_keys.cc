#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

Condition with_compression() {
  return {"compression.gradients or compression.sums int8 or int4",
          {"/compression/gradients", "/compression/sums"},
          [](const Strategy& s) {
            return s.compression.gradients != WireForm::kPlain || s.compression.sums != WireForm::kPlain;
          }};
}

/// Under the others every sum has one owner, on a mesh with one replica.
Condition with_whole_sums() {
  return {"a strategy under which ranks get whole sums (NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD)",
          {"/strategy", "/mesh/replicate"},
          gets_whole_sums};
}

/// Under these a rank has all gradients of a unit in one place.
Condition with_whole_gradients() {
  return {"strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS", {"/strategy"}, [](const Strategy& s) {
            return s.strategy == ShardingStrategy::kNoShard || s.strategy == ShardingStrategy::kShardOptimizer ||
                   s.strategy == ShardingStrategy::kShardGradients;
          }};
}

}  // namespace

std::vector<StrategyKey> compression_keys() {
  return {
      {.pointer = "/compression/gradients",
       .field = choice_field(AT(compression.gradients), wire_forms()),
       .default_json = R"("none")",
       .example_json = R"("int8")",
       .doc = "How ranks send gradients to be summed, over a network. What several ranks of a host send is summed in "
              "the host's "
              "memory first. Sums are made in fp32. Between ranks of one host it has no effect.",
       .cost = "Each gradient is rounded once: by at most 1/254 (int8) or 1/14 (int4) of the largest of its 256 "
               "neighbours."},
      {.pointer = "/compression/sums",
       .field = choice_field(AT(compression.sums), wire_forms()),
       .default_json = R"("none")",
       .example_json = R"("int8")",
       .doc = "How the rank that made a sum sends it to the ranks that need it too. Every rank, its maker included, "
              "goes on with "
              "what was sent.",
       .cost = "The sum is rounded once more.",
       .only_if = with_whole_sums()},
      {.pointer = "/compression/axes",
       .field = choice_field(AT(compression.axes), compressed_axes()),
       .default_json = R"("both")",
       .example_json = R"("replicate")",
       .doc = "The axes of the mesh over which gradients are compressed.",
       .cost = "None.",
       .only_if = with_compression()},
      {.pointer = "/compression/error_feedback",
       .field = boolean_field(AT(compression.error_feedback)),
       .default_json = "false",
       .example_json = "true",
       .doc = "What rounding took from a gradient is added to the next one (error feedback, arXiv 1901.09847). A step "
              "that is skipped and set_trainable begin anew, from zero; a checkpoint has what was kept.",
       .cost = "Memory: 4 bytes for each gradient that this rank sends.",
       .only_if = {"compression.gradients int8 or int4",
                   {"/compression/gradients"},
                   [](const Strategy& s) { return s.compression.gradients != WireForm::kPlain; }}},
      {.pointer = "/compression/power_sgd_rank",
       .field = integer_field(AT(compression.power_sgd_rank)),
       .range = {0, 1024},
       .default_json = "0",
       .example_json = "4",
       .doc =
           "Above 0: over a network, the gradient of a matrix goes as two factors of this rank (PowerSGD, arXiv "
           "1905.13727), where those are shorter than it; all else goes as it is. What that lacks is added to the next "
           "gradient; a step that is skipped, gradients dropped by zero_grad, and set_trainable "
           "begin anew; a checkpoint has what was kept. Where all ranks share one host it has no effect.",
       .cost = "Gradients are not exact, which slows learning most where it begins (start_step). Memory: 4 bytes for "
               "each element of a matrix, and the factors.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/top_k",
       .field = number_field(AT(compression.top_k)),
       .range = {0, 1},
       .default_json = "0.0",
       .example_json = "0.01",
       .doc =
           "Above 0: over a network, a rank sends this share of the gradients of each flat group of a unit, those of "
           "largest magnitude, with their places. The others are added to its next gradient; a step that is skipped, "
           "gradients dropped by zero_grad, and set_trainable begin anew; a checkpoint has what was kept. Where all "
           "ranks "
           "share one host it has no effect.",
       .cost = "Gradients are not exact, which slows learning most where it begins (start_step). Memory: 4 bytes for "
               "each gradient, and 8 for each that a rank sends and for each "
               "that it gets.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/hook",
       .field = boolean_field(AT(compression.hook)),
       .default_json = "false",
       .example_json = "true",
       .doc = "A rule of the program's own sums gradients over ranks (tessera/comm_hook.h), between ranks of one host "
              "too. What it keeps from step to step, no checkpoint has.",
       .cost = "The rule's.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/start_step",
       .field = integer_field(AT(compression.start_step)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "1000",
       .doc = "The first so many steps of training send all gradients as they are.",
       .cost = "They take as long as without compression.",
       .only_if = {"compression.power_sgd_rank, top_k or hook",
                   {"/compression/power_sgd_rank", "/compression/top_k", "/compression/hook"},
                   [](const Strategy& s) {
                     return s.compression.power_sgd_rank > 0 || s.compression.top_k > 0 || s.compression.hook;
                   }}},
  };
}

}  // namespace tessera
