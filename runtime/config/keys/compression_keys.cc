#include <string>

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

/// Holds for strategies under which ranks get whole sums of gradients from each other. Under all other strategies, on a
/// mesh with one replica, every sum has one owner.
Condition with_whole_sums() {
  return {"a strategy under which ranks get whole sums (NO_SHARD, SHARD_OPTIMIZER, HYBRID_SHARD)",
          {"/strategy", "/mesh/replicate", "/mesh/shard", "/mesh/host", "/mesh/rank", "/placement/gradients"},
          gets_whole_sums};
}

/// Holds for strategies under which a rank has all gradients of a unit in one place.
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
StrategyField field_of(std::int64_t Method::*member) {
  return integer_field(in_method(member));
}
template <typename Method>
StrategyField field_of(double Method::*member) {
  return number_field(in_method(member));
}

/// A key of a method, with the fields that rows of TESSERA_COMPRESSION_METHODS give.
#define TESSERA_METHOD_KEY(Config, member, ...) \
  { .pointer = "/compression/method/" #member, .field = field_of(&Config::member), __VA_ARGS__ }

std::string not_exact(const std::string& memory) {
  return "Gradients are not exact, which slows learning most where it begins (start_step). Memory: " + memory;
}

TypeRow<NoMethodConfig> none_row() {
  return {"none", "All gradients go, as gradients and sums say.", "They are exact."};
}

/// A row for one method; the rows of "none" and of other methods come before it.
#define TESSERA_ROW(Config, word, text, cost, ...) \
  , TypeRow<Config> {                              \
    word, text, cost, { __VA_ARGS__ }              \
  }

}  // namespace

std::vector<StrategyKey> compression_keys() {
  return {
      {.field = choice_field(AT(compression.gradients), wire_forms()),
       .example_json = R"("int8")",
       .doc = "How ranks send gradients to be summed, over a network. What several ranks of a host send is summed in "
              "the host's memory first. Sums are made in fp32. Between ranks of one host it has no effect.",
       .cost = "Each gradient is rounded once: by at most 1/254 (int8) or 1/14 (int4) of the largest of its 256 "
               "neighbours. lossless rounds nothing, and costs processor time: a core packs some 5 GB/s."},
      {.field = choice_field(AT(compression.sums), wire_forms()),
       .example_json = R"("int8")",
       .doc = "How the rank that made a sum sends it to the ranks that need it too. Every rank, its maker included, "
              "goes on with what was sent.",
       .cost = "int8 and int4 round the sum once more.",
       .only_if = with_whole_sums()},
      {.field = choice_field(AT(compression.gathers), wire_forms()),
       .example_json = R"("lossless")",
       .doc = "How ranks send parameters to each other, over a network: those of units that are gathered, and updated "
              "ones. lossless packs fp32 and bf16. int8 and int4 (qwZ of ZeRO++, arXiv 2306.10209) need FULL_SHARD or "
              "HYBRID_SHARD: forward and backward then use rounded parameters, the same on all ranks, in memory that "
              "is given up after use. Masters, updates and checkpoints stay exact, and so does what tessera::Gathered "
              "shows. Between ranks of one host that share memory it has no effect. GPUs send through their hosts.",
       .cost = "int8 and int4 round each parameter: by at most 1/254 (int8) or 1/14 (int4) of the largest of its 256 "
               "neighbours; one that is infinite makes them NaN. Processor time: a core packs some 5 GB/s.",
       .only_if = {"a strategy under which ranks send parameters (all but NO_SHARD)",
                   {"/strategy", "/placement/optimizer"},
                   [](const Strategy& s) { return placement_axes(s).optimizer != CutAxes{}; }}},
      {.field = choice_field(AT(compression.axes), compressed_axes()),
       .example_json = R"("replicate")",
       .doc = "The axes of the mesh over which gradients are compressed; gathers has nothing to do with it.",
       .cost = "None.",
       .only_if = with_compression()},
      {.field = boolean_field(AT(compression.error_feedback)),
       .example_json = "true",
       .doc = "What rounding took from a gradient is added to the next one (error feedback, arXiv 1901.09847). A step "
              "that is skipped (but see restore_skipped) and set_trainable begin anew, from zero; a checkpoint has "
              "what was kept.",
       .cost = "Memory: 4 bytes for each gradient that this rank sends.",
       .only_if = {"compression.gradients int8 or int4",
                   {"/compression/gradients"},
                   [](const Strategy& s) { return is_lossy(s.compression.gradients); }}},
      {.field = variant_field(AT(compression.method), none_row() TESSERA_COMPRESSION_METHODS(TESSERA_ROW)),
       .default_json = R"({"type": "none"})",
       .example_json = R"({"type": "power_sgd", "rank": 4})",
       .doc = "How ranks sum gradients from less than all of them, over a network. What a type keeps is added to the "
              "next gradient; a step that is skipped, gradients dropped by zero_grad (but see restore_skipped), and "
              "set_trainable begin anew; a checkpoint has what was kept. Where all ranks share one host this has no "
              "effect, but for type hook.",
       .cost = "That of its type.",
       .only_if = with_whole_gradients()},
      {.field = boolean_field(AT(compression.restore_skipped)),
       .example_json = "true",
       .doc = "A step that is skipped, and gradients that zero_grad drops, leave what compression keeps as it was "
              "before the step. Without, that begins anew, from zero.",
       .cost = "Memory: as much again as is kept. Time: a copy of it each step.",
       .only_if = with_kept_gradients()},
      {.field = integer_field(AT(compression.start_step), {0, kMany}, "steps"),
       .example_json = "1000",
       .doc = "The first so many steps of training that are not skipped go without method: all gradients are sent as "
              "they are.",
       .cost = "They take as long as without compression.",
       .only_if = with_method()},
  };
}
#undef TESSERA_ROW
#undef TESSERA_METHOD_KEY

}  // namespace tessera
