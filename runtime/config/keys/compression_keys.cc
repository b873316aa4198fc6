#include <algorithm>
#include <string>

#include "runtime/config/compression_methods.h"
#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

Condition with_compression() {
  return {"compression.gradients or compression.sums other than none",
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

bool has_method(const Strategy& s) {
  return std::ranges::any_of(compression_methods(),
                             [&](const CompressionMethod& method) { return method.is_used(s.compression); });
}

Condition with_method() {
  Condition condition{std::string("compression.") + kACompressionMethod, {}, has_method};
  for (const CompressionMethod& method : compression_methods())
    condition.reads.push_back(std::string("/compression/") + method.key);
  return condition;
}

Condition with_draws() {
  return {"compression.random_k, qsgd_levels or terngrad",
          {"/compression/random_k", "/compression/qsgd_levels", "/compression/terngrad"},
          [](const Strategy& s) {
            return s.compression.random_k > 0 || s.compression.qsgd_levels > 0 || s.compression.terngrad;
          }};
}

Condition with_kept_gradients() {
  return {"compression.error_feedback, power_sgd_rank, top_k, random_k, sign feedback or one_bit",
          {"/compression/error_feedback", "/compression/power_sgd_rank", "/compression/top_k", "/compression/random_k",
           "/compression/sign", "/compression/one_bit"},
          [](const Strategy& s) { return keeps_gradients(s.compression); }};
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
               "neighbours. lossless rounds nothing, and costs processor time: a core packs some 5 GB/s."},
      {.pointer = "/compression/sums",
       .field = choice_field(AT(compression.sums), wire_forms()),
       .default_json = R"("none")",
       .example_json = R"("int8")",
       .doc = "How the rank that made a sum sends it to the ranks that need it too. Every rank, its maker included, "
              "goes on with "
              "what was sent.",
       .cost = "int8 and int4 round the sum once more.",
       .only_if = with_whole_sums()},
      {.pointer = "/compression/gathers",
       .field = choice_field(AT(compression.gathers), wire_forms()),
       .default_json = R"("none")",
       .example_json = R"("lossless")",
       .doc = "How ranks send parameters to each other, over a network: those of units that are gathered, and updated "
              "ones. "
              "lossless packs fp32 and bf16. int8 and int4 (qwZ of ZeRO++, arXiv 2306.10209) need FULL_SHARD or "
              "HYBRID_SHARD: "
              "forward and backward then use rounded parameters, the same on all ranks, in memory that is given up "
              "after use. "
              "Masters, updates and checkpoints stay exact, and so does what tessera::Gathered shows. Between ranks of "
              "one "
              "host it has no effect.",
       .cost = "int8 and int4 round each parameter: by at most 1/254 (int8) or 1/14 (int4) of the largest of its 256 "
               "neighbours; one that is infinite makes them NaN. Processor time: a core packs some 5 GB/s.",
       .only_if = {"a strategy under which ranks send parameters (all but NO_SHARD)",
                   {"/strategy"},
                   [](const Strategy& s) { return s.strategy != ShardingStrategy::kNoShard; }}},
      {.pointer = "/compression/axes",
       .field = choice_field(AT(compression.axes), compressed_axes()),
       .default_json = R"("both")",
       .example_json = R"("replicate")",
       .doc = "The axes of the mesh over which gradients are compressed; gathers has nothing to do with it.",
       .cost = "None.",
       .only_if = with_compression()},
      {.pointer = "/compression/error_feedback",
       .field = boolean_field(AT(compression.error_feedback)),
       .default_json = "false",
       .example_json = "true",
       .doc = "What rounding took from a gradient is added to the next one (error feedback, arXiv 1901.09847). A step "
              "that is skipped (but see restore_skipped) and set_trainable begin anew, from zero; a checkpoint has "
              "what was kept.",
       .cost = "Memory: 4 bytes for each gradient that this rank sends.",
       .only_if = {"compression.gradients int8 or int4",
                   {"/compression/gradients"},
                   [](const Strategy& s) { return is_lossy(s.compression.gradients); }}},
      {.pointer = "/compression/power_sgd_rank",
       .field = integer_field(AT(compression.power_sgd_rank)),
       .range = {0, 1024},
       .default_json = "0",
       .example_json = "4",
       .doc =
           "Above 0: over a network, the gradient of a matrix goes as two factors of this rank (PowerSGD, arXiv "
           "1905.13727), where those are shorter than it; all else goes as it is. What that lacks is added to the next "
           "gradient; a step that is skipped, gradients dropped by zero_grad (but see restore_skipped), and "
           "set_trainable "
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
           "gradients dropped by zero_grad (but see restore_skipped), and set_trainable begin anew; a checkpoint has "
           "what was kept. Where all "
           "ranks "
           "share one host it has no effect.",
       .cost = "Gradients are not exact, which slows learning most where it begins (start_step). Memory: 4 bytes for "
               "each gradient, and 8 for each that a rank sends and for each "
               "that it gets.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/top_k_momentum",
       .field = number_field(AT(compression.top_k_momentum)),
       .range = {0, 1, false, true},
       .default_json = "0.0",
       .example_json = "0.9",
       .doc = "Above 0: what top_k keeps and sends is the momentum of a rank's own gradients (momentum correction and "
              "momentum factor masking of Deep Gradient Compression, arXiv 1712.01887), which this multiplies each "
              "step. It stands in for the optimizer's momentum: take sgd with momentum 0, whose steps are then those "
              "of momentum SGD. An optimizer with momentum of its own applies both: sgd's steps get 1 / (1 - this) "
              "times as "
              "long, so its lr has to be that much smaller; Adam and its kin divide that out again, but their first "
              "moment is smoothed twice, and so later by about 1 / (1 - this) steps.",
       .cost = "Memory: 4 bytes more for each gradient.",
       .only_if = {"compression.top_k above 0",
                   {"/compression/top_k"},
                   [](const Strategy& s) { return s.compression.top_k > 0; }}},
      {.pointer = "/compression/random_k",
       .field = number_field(AT(compression.random_k)),
       .range = {0, 1},
       .default_json = "0.0",
       .example_json = "0.01",
       .doc =
           "Above 0: over a network, ranks send this share of the gradients of each flat group of a unit, others each "
           "time, drawn from seed, the same on all ranks; so their places do not travel. The others are added to the "
           "next gradient, as for top_k.",
       .cost = "Gradients are not exact: an element waits for 1 / random_k steps in the mean, whatever it is. Memory: "
               "4 bytes for each gradient, and 8 for each that a rank sends.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/sign",
       .field = choice_field(AT(compression.sign), sign_forms()),
       .default_json = R"("none")",
       .example_json = R"("feedback")",
       .doc = "Over a network, ranks send the signs of gradients. majority (signSGD with majority vote, arXiv "
              "1810.05291): the mean gradient is 1 or -1, as most ranks have it; zeros vote, and ties end, + and - by "
              "turns. feedback (EF-signSGD, arXiv 1901.09847): each 256 neighbours have their mean magnitude, and what "
              "that lacks is added to the next gradient, as for top_k.",
       .cost = "Gradients are not exact. majority loses all magnitudes: lr is the size of a step of sgd, and "
               "gradient_clipping sees a norm that depends on the number of parameters alone. Memory of feedback: 4 "
               "bytes for each gradient.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/one_bit",
       .field = boolean_field(AT(compression.one_bit)),
       .default_json = "false",
       .example_json = "true",
       .doc = "Over a network, ranks send one bit a gradient and a scale for each 256, and get sums in the same form; "
              "what "
              "either lacks is added to the next one. That is the compression of 1-bit Adam (arXiv 2102.02888), which "
              "this is with one_bit_momentum, start_step and optimizer.freeze_step; by itself it is one of gradients, "
              "of which the optimizer moves all its moments.",
       .cost = "Gradients are not exact, which slows learning most where it begins (start_step). Memory: 4 bytes for "
               "each gradient, and for each whose sum a rank makes.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/one_bit_momentum",
       .field = number_field(AT(compression.one_bit_momentum)),
       .range = {0, 0.999},
       .default_json = "0.0",
       .example_json = "0.9",
       .doc = "Above 0: what one_bit sends is momentum, which this multiplies each step, as 1-bit Adam does; the "
              "optimizer gets the gradients that move its own momentum in the same way. Give it the optimizer's: "
              "betas[0] of adamw, with freeze_step and start_step alike.",
       .cost = "Memory: 4 bytes more for each gradient. A single gradient is wrong by up to 1 / (1 - this) times as "
               "much. The optimizer's momentum takes that back, but gradient_clipping sees it. Parameters that have "
               "had fewer than freeze_step updates when it begins make second moments of such gradients.",
       .only_if = {"compression.one_bit",
                   {"/compression/one_bit"},
                   [](const Strategy& s) { return s.compression.one_bit; }}},
      {.pointer = "/compression/qsgd_levels",
       .field = integer_field(AT(compression.qsgd_levels)),
       .range = {0, 127},
       .default_json = "0",
       .example_json = "7",
       .doc =
           "Above 0: over a network, ranks send gradients as so many levels of the norm of 256 neighbours, with their "
           "signs, rounded stochastically (QSGD, arXiv 1610.02132): the mean of what is sent is the gradient, and "
           "nothing is kept. A gradient takes 2 bits (1 level), 4 (up to 7) or 8.",
       .cost = "Gradients are noisy: the fewer levels, the more.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/terngrad",
       .field = boolean_field(AT(compression.terngrad)),
       .default_json = "false",
       .example_json = "true",
       .doc =
           "Over a network, ranks send gradients as -1, 0 or 1 times the largest magnitude of 256 neighbours, rounded "
           "stochastically (TernGrad, arXiv 1705.07878), in 2 bits each; as qsgd_levels.",
       .cost = "Gradients are noisy.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/seed",
       .field = integer_field(AT(compression.seed)),
       .range = {0, kMany},
       .default_json = "0",
       .example_json = "1",
       .doc = "Of what random_k, qsgd_levels and terngrad draw, together with unit, step, and (but for random_k) rank.",
       .cost = "None.",
       .only_if = with_draws()},
      {.pointer = "/compression/restore_skipped",
       .field = boolean_field(AT(compression.restore_skipped)),
       .default_json = "false",
       .example_json = "true",
       .doc =
           "A step that is skipped, and gradients that zero_grad drops, leave what compression keeps as it was before "
           "the step. Without, that begins anew, from zero.",
       .cost = "Memory: as much again as is kept. Time: a copy of it each step.",
       .only_if = with_kept_gradients()},
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
       .doc = "The first so many steps of training that are not skipped send all gradients as they are.",
       .cost = "They take as long as without compression.",
       .only_if = with_method()},
  };
}

}  // namespace tessera
