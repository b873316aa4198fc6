#include <string>
#include <utility>

#include "runtime/config/placement_rows.h"
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

/// Every sum has one owner under the other strategies, on a mesh with one replica.
Condition with_whole_sums() {
  return {"a strategy under which ranks get whole sums (NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD)",
          {"/strategy", "/mesh/replicate", "/mesh/shard", "/mesh/host", "/mesh/rank", "/placement/gradients"},
          gets_whole_sums};
}

/// A rank has all gradients of a unit in one place under these strategies.
Condition with_whole_gradients() {
  return {"strategy NO_SHARD, SHARD_OPTIMIZER or SHARD_GRADIENTS",
          {"/strategy", "/placement/parameters"},
          [](const Strategy& s) { return !placement_axes(s).parameters.rank; }};
}

Condition with_method() {
  return {"a compression.method other than none", {"/compression/method"}, [](const Strategy& s) {
            return s.compression.has_method();
          }};
}

Condition with_kept_gradients() {
  return {"compression.error_feedback, or a compression.method that keeps gradients",
          {"/compression/error_feedback", "/compression/method"},
          [](const Strategy& s) { return keeps_gradients(s.compression); }};
}

/// Finds a member of the method that a strategy has.
template <typename Method, typename Value>
auto in_method(Value Method::*member) {
  return [member](auto& s) -> auto& { return std::get<Method>(s.compression.method).*member; };
}

template <typename Method>
StrategyKey fraction_key() {
  return {.pointer = "/compression/method/fraction",
          .field = number_field(in_method(&Method::fraction)),
          .range = {0, 1, true},
          .default_json = "0.01",
          .example_json = "0.1",
          .doc = "The share of the gradients of each flat group of a unit that is sent.",
          .cost = "As many more bytes."};
}

template <typename Method>
StrategyKey seed_key(std::string doc) {
  return {.pointer = "/compression/method/seed",
          .field = integer_field(in_method(&Method::seed)),
          .range = {0, kMany},
          .default_json = "0",
          .example_json = "1",
          .doc = std::move(doc),
          .cost = "None."};
}

std::string not_exact(const std::string& memory) {
  return "Gradients are not exact, which slows learning most where it begins (start_step). Memory: " + memory;
}
constexpr char kSeed[] = "What is drawn depends on it, the unit and the step";

TypeRow<NoMethodConfig> none_row() {
  return {"none", "All gradients go, as gradients and sums say.", "They are exact."};
}

TypeRow<PowerSgdConfig> power_sgd_row() {
  return {"power_sgd",
          "The gradient of a matrix goes as two factors (PowerSGD, arXiv 1905.13727), where those are "
          "shorter than it; all else goes as it is. What is not sent is kept.",
          not_exact("4 bytes for each element of a matrix, and the factors."),
          {{.pointer = "/compression/method/rank",
            .field = integer_field(in_method(&PowerSgdConfig::rank)),
            .range = {1, 1024},
            .default_json = "4",
            .example_json = "2",
            .doc = "The rank of the factors.",
            .cost = "As many more bytes."}}};
}

TypeRow<TopKConfig> top_k_row() {
  return {
      "top_k",
      "A rank sends the gradients of largest magnitude, with their places. What is not sent is kept.",
      not_exact("4 bytes for each gradient, and 8 for each that a rank sends and for each that it gets."),
      {fraction_key<TopKConfig>(),
       {.pointer = "/compression/method/momentum",
        .field = number_field(in_method(&TopKConfig::momentum)),
        .range = {0, 1, false, true},
        .default_json = "0.0",
        .example_json = "0.9",
        .doc = "Above 0: what a rank keeps and sends is the momentum of its own gradients (momentum correction and "
               "momentum factor masking of Deep Gradient Compression, arXiv 1712.01887), which this multiplies each "
               "step. It stands in for the optimizer's momentum: take sgd with momentum 0, whose steps are then "
               "those of momentum SGD. An optimizer with momentum of its own applies both: sgd's steps get 1 / (1 - "
               "this) times as long, so its lr has to be that much smaller; Adam and its kin divide that out again, "
               "but their first moment is smoothed twice, and so later by about 1 / (1 - this) steps.",
        .cost = "Memory: 4 bytes more for each gradient."}}};
}

TypeRow<RandomKConfig> random_k_row() {
  return {
      "random_k",
      "Ranks send some gradients, others each time, drawn from seed, the same on all ranks; so their "
      "places do not travel. What is not sent is kept.",
      "Gradients are not exact: an element waits for 1 / fraction steps in the mean, whatever it is. Memory: 4 bytes "
      "for each gradient, and 8 for each that a rank sends.",
      {fraction_key<RandomKConfig>(), seed_key<RandomKConfig>(std::string(kSeed) + ".")}};
}

TypeRow<SignMajorityConfig> sign_majority_row() {
  return {
      "sign_majority",
      "Ranks send the signs of gradients and vote (signSGD with majority vote, arXiv 1810.05291): the mean gradient "
      "is 1 or -1, as most ranks have it; zeros vote, and ties end, + and - by turns.",
      "Gradients lose all magnitudes: lr is the size of a step of sgd, and gradient_clipping sees a norm that "
      "depends on the number of parameters alone."};
}

TypeRow<SignFeedbackConfig> sign_feedback_row() {
  return {"sign_feedback",
          "Ranks send the signs of gradients, and of each 256 neighbours the mean magnitude (EF-signSGD, "
          "arXiv 1901.09847). What is not sent is kept.",
          not_exact("4 bytes for each gradient.")};
}

TypeRow<OneBitConfig> one_bit_row() {
  return {"one_bit",
          "Ranks send one bit a gradient and a scale for each 256, and get sums in the same form. That is "
          "the compression of 1-bit Adam (arXiv 2102.02888), which this is with momentum, start_step and "
          "optimizer.freeze_step; by itself it is one of gradients, of which the optimizer moves all its "
          "moments. What is not sent is kept.",
          not_exact("4 bytes for each gradient, and for each whose sum a rank makes."),
          {{.pointer = "/compression/method/momentum",
            .field = number_field(in_method(&OneBitConfig::momentum)),
            .range = {0, 0.999},
            .default_json = "0.0",
            .example_json = "0.9",
            .doc = "Above 0: what ranks send is momentum, which this multiplies each step, as 1-bit Adam does; the "
                   "optimizer gets the gradients that move its own momentum in the same way. Give it the optimizer's: "
                   "betas[0] of adamw, with freeze_step and start_step alike.",
            .cost = "Memory: 4 bytes more for each gradient. A single gradient is wrong by up to 1 / (1 - this) times "
                    "as much. The optimizer's momentum takes that back, but gradient_clipping sees it. Parameters that "
                    "have had fewer than freeze_step updates when it begins make second moments of such gradients."}}};
}

TypeRow<QsgdConfig> qsgd_row() {
  return {
      "qsgd",
      "Ranks send gradients as levels of the norm of 256 neighbours, with their signs, rounded stochastically (QSGD, "
      "arXiv 1610.02132): the mean of what is sent is the gradient, and nothing is kept.",
      "Gradients are noisy.",
      {{.pointer = "/compression/method/levels",
        .field = integer_field(in_method(&QsgdConfig::levels)),
        .range = {1, 127},
        .default_json = "7",
        .example_json = "1",
        .doc = "How many levels there are. A gradient takes 2 bits (1 level), 4 (up to 7) or 8.",
        .cost = "More bytes, and less noise."},
       seed_key<QsgdConfig>(std::string(kSeed) + ", and on the rank.")}};
}

TypeRow<TernGradConfig> terngrad_row() {
  return {"terngrad",
          "Ranks send gradients as -1, 0 or 1 times the largest magnitude of 256 neighbours, rounded stochastically "
          "(TernGrad, arXiv 1705.07878), in 2 bits each; nothing is kept.",
          "Gradients are noisy.",
          {seed_key<TernGradConfig>(std::string(kSeed) + ", and on the rank.")}};
}

TypeRow<CommHookConfig> hook_row() {
  return {"hook",
          "A rule of the program's own sums gradients over ranks (tessera/comm_hook.h), between ranks of one host too. "
          "What it keeps from step to step, no checkpoint has.",
          "It costs what the rule does."};
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
              "one host that share memory it has no effect. GPUs send through their hosts.",
       .cost = "int8 and int4 round each parameter: by at most 1/254 (int8) or 1/14 (int4) of the largest of its 256 "
               "neighbours; one that is infinite makes them NaN. Processor time: a core packs some 5 GB/s.",
       .only_if = {"a strategy under which ranks send parameters (all but NO_SHARD)",
                   {"/strategy", "/placement/optimizer"},
                   [](const Strategy& s) { return placement_axes(s).optimizer != CutAxes{}; }}},
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
      {.pointer = "/compression/method",
       .field = variant_field(AT(compression.method), none_row(), power_sgd_row(), top_k_row(), random_k_row(),
                              sign_majority_row(), sign_feedback_row(), one_bit_row(), qsgd_row(), terngrad_row(),
                              hook_row()),
       .default_json = R"({"type": "none"})",
       .example_json = R"({"type": "power_sgd", "rank": 4})",
       .doc =
           "How ranks sum gradients from less than all of them, over a network. What a type keeps is added to the next "
           "gradient; a step that is skipped, gradients dropped by zero_grad (but see restore_skipped), and "
           "set_trainable begin anew; a checkpoint has what was kept. Where all ranks share one host this has no "
           "effect, "
           "but for type hook.",
       .cost = "That of its type.",
       .only_if = with_whole_gradients()},
      {.pointer = "/compression/restore_skipped",
       .field = boolean_field(AT(compression.restore_skipped)),
       .default_json = "false",
       .example_json = "true",
       .doc =
           "A step that is skipped, and gradients that zero_grad drops, leave what compression keeps as it was before "
           "the step. Without, that begins anew, from zero.",
       .cost = "Memory: as much again as is kept. Time: a copy of it each step.",
       .only_if = with_kept_gradients()},
      {.pointer = "/compression/start_step",
       .field = integer_field(AT(compression.start_step)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "1000",
       .doc = "The first so many steps of training that are not skipped go without method: all gradients are sent as "
              "they are.",
       .cost = "They take as long as without compression.",
       .only_if = with_method()},
  };
}

}  // namespace tessera
