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
          [](const Strategy& s) {
            const bool whole = s.strategy == ShardingStrategy::kNoShard ||
                               s.strategy == ShardingStrategy::kShardOptimizer ||
                               s.strategy == ShardingStrategy::kHybridShard;
            return whole || s.mesh.replicate > 1;
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
              "that is "
              "skipped, set_trainable and load_checkpoint begin anew, from zero.",
       .cost = "Memory: 4 bytes for each gradient that this rank sends.",
       .only_if = {"compression.gradients int8 or int4",
                   {"/compression/gradients"},
                   [](const Strategy& s) { return s.compression.gradients != WireForm::kPlain; }}},
  };
}

}  // namespace tessera
