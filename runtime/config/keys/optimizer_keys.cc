#include <algorithm>

#include "runtime/config/optimizer_rows.h"
#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

// This file has the rows of "optimizer", "ema" and of keys that describe a step. Helpers come first: conditions ("only
// with type sgd"), defaults that depend on the type, and the keys of a parameter group, which are rows of their own.
// The functions at the end have one row for each key.

namespace tessera {
namespace {

/// Returns the condition that the type of the optimizer has one of the traits.
Condition with_traits(unsigned traits) {
  return {"optimizer.type " + types_with(traits), {"/optimizer/type"}, [traits](const Strategy& s) {
            return has(s.optimizer.type, traits);
          }};
}
Condition with_deal_by_speed() { return with_value(AT(deal.by), "speed", DealBy::kSpeed); }
Condition with_muon() { return with_value(AT(optimizer.type), "muon", OptimizerType::kMuon); }
Condition with_adafactor() { return with_value(AT(optimizer.type), "adafactor", OptimizerType::kAdafactor); }

RulesDefault number_of_rules(double OptimizerDefaults::*number) {
  return [number](OptimizerType type, std::int64_t version) {
    return nlohmann::ordered_json(defaults_of(type, version).*number);
  };
}
RulesDefault lr_of_rules() { return number_of_rules(&OptimizerDefaults::lr); }
RulesDefault eps_of_rules() { return number_of_rules(&OptimizerDefaults::eps); }
RulesDefault weight_decay_of_rules() { return number_of_rules(&OptimizerDefaults::weight_decay); }
RulesDefault betas_of_rules() {
  return [](OptimizerType type, std::int64_t version) {
    const OptimizerDefaults defaults = defaults_of(type, version);
    return nlohmann::ordered_json::array({defaults.beta1, defaults.beta2});
  };
}
RulesDefault lr_adjustment_of_rules() {
  return [](OptimizerType type, std::int64_t version) {
    return nlohmann::ordered_json(name_of(defaults_of(type, version).adjust_lr));
  };
}

// Ranges of an optimizer's numbers, and of the numbers of a parameter group that replace them.
constexpr Range kDecayRange = {0, 1000}, kEpsRange = {1e-30, 1}, kBetaRange = {0, 1, false, true};

/// Keys of one ParameterGroup.
std::vector<StrategyKey> parameter_group_keys() {
  using namespace optimizer_traits;
  const auto member = [](const char* name) { return "/optimizer/groups/" + std::string(name); };
  const auto of_kind = [](ValueKind kind) {
    StrategyField field;
    field.kind = kind;
    return field;
  };
  StrategyField types = of_kind(ValueKind::kChoice);
  for (const OptimizerRow& row : optimizer_rows()) {
    if (row.type == OptimizerType::kAdamW || has(row.type, kMatrices)) types.choices.push_back({row.word, row.text});
  }
  return {
      {.pointer = member("name"),
       .field = of_kind(ValueKind::kName),
       .default_json = R"("")",
       .example_json = R"("head")",
       .doc = "What Engine::set_lr and messages call the group.",
       .cost = "None."},
      {.pointer = member("match"),
       .field = of_kind(ValueKind::kNames),
       .default_json = R"(["*"])",
       .example_json = R"(["*.bias", "*norm*"])",
       .doc = "Patterns of parameter names, with * and ? as in file names.",
       .cost = "None."},
      {.pointer = member("max_dim"),
       .field = of_kind(ValueKind::kInteger),
       .range = {0, 64},
       .unit = "dimensions",
       .default_json = "64",
       .example_json = "1",
       .doc = "Only parameters of at most so many dimensions; 1: biases and the weights of norms.",
       .cost = "None."},
      {.pointer = member("lr_ratio"),
       .field = of_kind(ValueKind::kNumber),
       .range = {0, 1000},
       .default_json = "1.0",
       .example_json = "0.1",
       .doc = "The group's learning rate as a share of everybody's.",
       .cost = "Too high: the loss diverges."},
      {.pointer = member("weight_decay"),
       .field = of_kind(ValueKind::kNumber),
       .range = kDecayRange,
       .default_json = "0.01",
       .example_json = "0.0",
       .doc = "As optimizer.weight_decay, whose value is the default.",
       .cost = "Too high: the model underfits.",
       .rules_default = weight_decay_of_rules()},
      {.pointer = member("eps"),
       .field = of_kind(ValueKind::kNumber),
       .range = kEpsRange,
       .default_json = "1e-08",
       .example_json = "1e-6",
       .doc = "As optimizer.eps, whose value is the default.",
       .cost = "Smaller steps where gradients are small.",
       .only_if = with_traits(kEps),
       .rules_default = eps_of_rules()},
      {.pointer = member("betas"),
       .field = of_kind(ValueKind::kNumberPair),
       .range = kBetaRange,
       .default_json = "[0.9, 0.999]",
       .example_json = "[0.9, 0.95]",
       .doc = "As optimizer.betas, whose value is the default.",
       .cost = "A longer memory: slower to follow a change.",
       .only_if = with_traits(kBetas),
       .rules_default = betas_of_rules()},
      {.pointer = member("type"),
       .field = types,
       .default_json = R"("muon")",
       .example_json = R"("adamw")",
       .doc = "Which rule updates the group's matrices: adamw, or that of optimizer.type. Left out: the latter, "
              "but adamw for those of embeddings.",
       .cost = "As optimizer.type.",
       .only_if = with_traits(kMatrices)},
      {.pointer = member("layer_adaptation"),
       .field = of_kind(ValueKind::kBoolean),
       .default_json = "true",
       .example_json = "false",
       .doc = "Whether the norms of each of the group's parameters adapt its rate. Mostly false for biases and the "
              "weights of norms.",
       .cost = "None.",
       .only_if = with_traits(kLayers)},
  };
}

ParameterGroup group_from(const nlohmann::json& object) {
  ParameterGroup group;
  const auto take = [&](const char* name, auto& to) {
    if (object.contains(name)) to = object.at(name).get<typename std::decay_t<decltype(to)>>();
  };
  const auto take_optional = [&](const char* name, auto& to) {
    if (object.contains(name)) to = object.at(name).get<typename std::decay_t<decltype(to)>::value_type>();
  };
  take("name", group.name);
  take("match", group.match);
  take("lr_ratio", group.lr_ratio);
  take_optional("max_dim", group.max_dim);
  take_optional("weight_decay", group.weight_decay);
  take_optional("eps", group.eps);
  take_optional("betas", group.betas);
  if (object.contains("type")) {
    const std::string type = object.at("type").get<std::string>();
    const auto row = std::ranges::find(optimizer_rows(), type, &OptimizerRow::word);
    if (row != optimizer_rows().end()) group.type = row->type;
  }
  take("layer_adaptation", group.layer_adaptation);
  return group;
}

/// Writes the values that a parameter group sets, and none that it takes from the optimizer.
nlohmann::ordered_json json_of(const ParameterGroup& group) {
  nlohmann::ordered_json object = nlohmann::ordered_json::object();
  if (!group.name.empty()) object["name"] = group.name;
  object["match"] = group.match;
  if (group.max_dim) object["max_dim"] = *group.max_dim;
  if (group.weight_decay) object["weight_decay"] = *group.weight_decay;
  object["lr_ratio"] = group.lr_ratio;
  if (group.eps) object["eps"] = *group.eps;
  if (group.betas) object["betas"] = *group.betas;
  if (group.type) object["type"] = name_of(*group.type);
  if (!group.layer_adaptation) object["layer_adaptation"] = false;
  return object;
}

StrategyField parameter_groups_field() {
  StrategyField field = made_field(
      ValueKind::kObjects, AT(optimizer.groups),
      [](Strategy& s, const nlohmann::json& list) {
        s.optimizer.groups.clear();
        for (const nlohmann::json& object : list) s.optimizer.groups.push_back(group_from(object));
      },
      [](const Strategy& s) {
        nlohmann::ordered_json list = nlohmann::ordered_json::array();
        for (const ParameterGroup& group : s.optimizer.groups) list.push_back(json_of(group));
        return list;
      });
  field.members = parameter_group_keys();
  return field;
}

}  // namespace

std::vector<StrategyKey> step_keys() {
  return {
      {.field = integer_field(AT(gradient_accumulation), {1, 1e6}, "microbatches"),
       .example_json = "4",
       .doc = "Microbatches whose gradients make one step. The Engine takes their mean: a loss is not divided by it.",
       .cost = "Time of a step; the global batch grows with it."},
      {.field = choice_field(AT(gradient_sync), gradient_syncs()),
       .example_json = R"("last_microbatch")",
       .doc = "When gradients are reduced under gradient accumulation. The same with one microbatch a step.",
       .cost = "last_microbatch: 4 bytes a parameter, unsharded."},
      {.field = boolean_field(AT(reproducible)),
       .example_json = "true",
       .doc = "The same bits on any number of ranks that make the same microbatches: a step's sums are one tree over "
              "its microbatches, whoever computes them, and the Engine sets LibTorch's generator for each microbatch. "
              "docs/reproducible.md says which numbers of ranks and microbatches go together. A GPU takes it with "
              "gradient_sync last_microbatch, on one rank or with transport cuda_host.",
       .cost = "Memory for the sums that wait for others, where a rank has several microbatches a step; the plan says "
               "how much. Sums are of fp32, and gradients of parameters that go unused are waited for."},
      {.field = integer_field(AT(record_hashes.every), {0, kMany}, "steps"),
       .example_json = "100",
       .doc = "After each so many steps rank 0 writes a line with loss, norm, and a hash of 8 bytes for each unit: of "
              "its sums of gradients and of its new parameters, in fp32. The lines are those of any other number of "
              "ranks, so a replay compares with them (docs/reproducible.md). The CPU trains then. 0: never.",
       .cost = "Such a step reads the rank's gradients and masters once more, and has one more all-gather of 16 bytes "
               "a unit.",
       .only_if = with_value(AT(reproducible), "true", true)},
      {.field = name_field(AT(record_hashes.file)),
       .example_json = R"("run/hashes.jsonl")",
       .doc = "That file of JSON lines. A run that goes on from a checkpoint takes out the lines of steps that it "
              "makes again. tessera train puts a relative one into its folder of --out.",
       .cost = "Some 30 bytes a unit and line.",
       .only_if = when_above_0(AT(record_hashes.every))},
      {.field = choice_field(AT(deal.by), deals()),
       .example_json = R"("speed")",
       .doc =
           "Which microbatches of a step a rank computes. With speed a rank's are a run of neighbours, "
           "Engine::microbatches, whose length is decided anew after each window of steps. It goes with gradient_sync "
           "last_microbatch, and where ranks gather nothing: parameters are whole, or shared by the ranks of a host.",
       .cost = "speed: none between ranks. With reproducible, sums of subtrees for the longest run."},
      {.field = integer_field(AT(deal.window), {1, 1e4}, "steps"),
       .example_json = "50",
       .doc = "Steps over which ranks' speeds are measured before microbatches are dealt anew. The median counts.",
       .cost = "None.",
       .only_if = with_deal_by_speed()},
      {.field = integer_field(AT(deal.longest), {0, 1e6}, "microbatches"),
       .example_json = "12",
       .doc = "The most microbatches of a step that one rank gets. 0: twice as many as a rank has at first, which is "
              "gradient_accumulation, or the longest of the even runs of deal.microbatches.",
       .cost = "With reproducible, memory for the sums that wait on such a rank, and their bytes between ranks.",
       .only_if = with_deal_by_speed()},
      {.field = integer_field(AT(deal.microbatches), {0, 1e6}, "microbatches"),
       .example_json = "25",
       .doc = "The microbatches of a step on all ranks together, more than there are ranks. The number of ranks need "
              "not divide it. 0: gradient_accumulation times the number of ranks.",
       .cost = "None.",
       .only_if = with_deal_by_speed()},
      {.field = integer_field(AT(deal.backups), {0, 64}, "microbatches"),
       .example_json = "2",
       .doc = "The most microbatches of slower ranks that a rank makes again in a step when it has ended its own. The "
              "first result counts, and the bits do not depend on whose it is. It goes with reproducible, and with a "
              "program that asks Engine::microbatch before each microbatch.",
       .cost = "Memory for the whole gradients of so many microbatches, and their bytes between ranks. An all-gather "
               "of so many numbers in each step, and sometimes a microbatch that another rank has ended first. Where "
               "ranks share no memory, two to four small questions to the job's store for each microbatch.",
       .only_if = with_deal_by_speed()},
      {.field = number_field(AT(gradient_clipping), {0, 1e30}),
       .example_json = "1.0",
       .doc = "Largest 2-norm of all gradients together; longer ones are scaled down to it. 0: off.",
       .cost = "None in time. Too low a limit slows learning."},
      {.field = number_field(AT(gradient_clip_value), {0, 1e30}),
       .example_json = "0.5",
       .doc = "Elements of the mean gradient are cut off at this value and its negative. 0: off.",
       .cost = "None in time. Unlike gradient_clipping it turns the gradient's direction."},
      {.field = choice_field(AT(broadcast_buffers), buffer_broadcasts()),
       .example_json = R"("from_rank_zero")",
       .doc = "What the end of a step does, before the next forward, with the module's buffers, such as running "
              "statistics of a BatchNorm, which each rank's forward writes.",
       .cost = "Of all buffers a broadcast or an all-reduce a step, which backward does not hide; on a GPU the step "
               "waits for it. microbatch_order: an all-gather of 16 bytes for each channel and microbatch."},
  };
}

std::vector<StrategyKey> optimizer_keys() {
  using namespace optimizer_traits;
  return {
      {.field = choice_field(AT(optimizer.type), optimizer_types()),
       .example_json = R"("sgd")",
       .doc = "The update rule.",
       .cost = "Numbers of state_dtype a parameter beside the master weight: adamw, adam and lamb 2, lion and adagrad "
               "1, rmsprop 1 to 3, sgd and lars with momentum 1, without 0; muon 1 for matrices; own and own_matrix as "
               "many as the rule says; adafactor 1 for vectors, and of matrices one for each row and column. muon, "
               "adafactor and own_matrix also need memory and time to exchange matrices between ranks; lamb and lars "
               "go over all state twice a step."},
      {.field = number_field(AT(optimizer.lr), {0, 1000}),
       .example_json = "3e-4",
       .doc = "Learning rate; the peak of the schedule.",
       .cost = "Too high: the loss diverges.",
       .rules_default = lr_of_rules()},
      {.pointer = "/optimizer/betas",
       .field = number_pair_field(AT(optimizer.beta1), AT(optimizer.beta2)),
       .range = kBetaRange,
       .default_json = "[0.9, 0.999]",
       .example_json = "[0.9, 0.95]",
       .doc = "Decay of the running mean of gradients, and of their squares. lion: of the mean in its direction, and "
              "of the mean that it keeps.",
       .cost = "A longer memory: slower to follow a change.",
       .only_if = with_traits(kBetas),
       .rules_default = betas_of_rules()},
      {.field = number_field(AT(optimizer.eps), kEpsRange),
       .example_json = "1e-6",
       .doc = "Added to the root of the mean, or of the sum, of squares; lars: to the norms that it divides by.",
       .cost = "Smaller steps where gradients are small.",
       .only_if = with_traits(kEps),
       .rules_default = eps_of_rules()},
      {.field = number_field(AT(optimizer.weight_decay), kDecayRange),
       .example_json = "0.1",
       .doc = "Pull towards zero: decoupled for adamw, lion, muon, lamb and adafactor, else added to the gradient; own "
              "and own_matrix: as the rule will have it. muon: of what adamw updates too.",
       .cost = "Too high: the model underfits.",
       .rules_default = weight_decay_of_rules()},
      {.field = number_field(AT(optimizer.momentum), {0, 1, false, true}),
       .example_json = "0.9",
       .doc = "Decay of the running sum of gradients; rmsprop: of its steps.",
       .cost = "Above 0: one number of state_dtype a parameter, sharded as the strategy says.",
       .only_if = with_traits(kMomentum)},
      {.field = number_field(AT(optimizer.dampening), {0, 1}),
       .example_json = "0.1",
       .doc = "The gradient enters the momentum times (1 - dampening).",
       .cost = "Smaller steps.",
       .only_if = with_traits(kDampening)},
      {.field = boolean_field(AT(optimizer.nesterov)),
       .example_json = "true",
       .doc = "Nesterov's momentum: step along the gradient plus the momentum to come.",
       .cost = "None.",
       .only_if = with_traits(kNesterov)},
      {.field = number_field(AT(optimizer.trust_coefficient), {0, 1000}),
       .example_json = "0.02",
       .doc = "A parameter's rate is multiplied by this, times the norm of its weights, divided by that of its "
              "gradient and its weight decay together.",
       .cost = "Too high: the loss diverges.",
       .only_if = with_traits(kTrustCoefficient)},
      {.field = number_field(AT(optimizer.alpha), kBetaRange),
       .example_json = "0.9",
       .doc = "Decay of the running mean of squared gradients.",
       .cost = "A longer memory: slower to follow a change.",
       .only_if = with_traits(kAlpha)},
      {.field = boolean_field(AT(optimizer.centered)),
       .example_json = "true",
       .doc = "Gradients are divided by their spread around a running mean of them, not around zero.",
       .cost = "4 bytes a parameter, sharded as the strategy says.",
       .only_if = with_traits(kCentered)},
      {.field = number_field(AT(optimizer.lr_decay), {0, 1000}),
       .example_json = "1e-4",
       .doc = "The rate of a parameter's step t is divided by 1 + (t - 1) * lr_decay.",
       .cost = "Smaller steps.",
       .only_if = with_traits(kLrDecay)},
      {.field = integer_field(AT(optimizer.freeze_step), {0, 1e12}, "steps"),
       .example_json = "1000",
       .doc = "Above 0: after so many steps of a parameter its second moments stay as they are, as 1-bit Adam wants it "
              "with compression.method one_bit; one that is less than a single gradient would make it takes that.",
       .cost = "Elements whose gradients were small until then are moved by up to 1 / sqrt(1 - beta2) times the rate: "
               "so many steps that training has settled, and several times 1 / (1 - beta2).",
       .only_if = with_traits(kFreezeStep)},
      {.field = number_field(AT(optimizer.muon.momentum), kBetaRange),
       .example_json = "0.9",
       .doc = "Decay of the running mean of gradients that is made orthogonal.",
       .cost = "A longer memory: slower to follow a change.",
       .only_if = with_muon()},
      {.field = boolean_field(AT(optimizer.muon.nesterov)),
       .example_json = "false",
       .doc = "Nesterov's momentum: what is made orthogonal is the gradient, moved towards the momentum.",
       .cost = "None.",
       .only_if = with_muon()},
      {.field = integer_field(AT(optimizer.muon.ns_steps), {1, 100}, "iterations"),
       .example_json = "6",
       .doc = "Newton-Schulz iterations that make a matrix orthogonal.",
       .cost = "Time: three products of matrices each, by one rank for each matrix.",
       .only_if = with_muon()},
      {.field = choice_field(AT(optimizer.muon.adjust_lr), muon_lr_adjustments()),
       .example_json = R"("match_rms_adamw")",
       .doc = "What a matrix's learning rate is multiplied by. Weight decay goes by the rate itself.",
       .cost = "original: matrices need a rate of their own, some ten times adamw's.",
       .only_if = with_muon(),
       .rules_default = lr_adjustment_of_rules()},
      {.field = choice_field(AT(optimizer.muon.ns_dtype), muon_dtypes()),
       .example_json = R"("bf16")",
       .doc = "In which numbers Newton-Schulz iterations compute.",
       .cost = "bf16: a direction that is off by a hundredth. A GPU, or a processor with products of bf16, multiplies "
               "several times as fast; another processor slower.",
       .only_if = with_muon()},
      {.field = number_field(AT(optimizer.adafactor.beta2_decay), {-10, 0}),
       .example_json = "-0.7",
       .doc = "The second moments keep 1 - t^beta2_decay of themselves at a parameter's step t.",
       .cost = "Nearer to 0: a shorter memory, and so noisier steps.",
       .only_if = with_adafactor()},
      {.field = number_field(AT(optimizer.adafactor.min_rms), {0, 1000}),
       .example_json = "0.01",
       .doc = "A parameter's root mean square, by which its rate is multiplied, counts as at least this.",
       .cost = "0: parameters that are zeros stay so.",
       .only_if = with_adafactor()},
      {.field = number_field(AT(optimizer.adafactor.clip_threshold), {1e-30, 1e30}),
       .example_json = "0.5",
       .doc = "Largest root mean square of a parameter's update, before the rate; longer ones are scaled down to it.",
       .cost = "Smaller: slower learning.",
       .only_if = with_adafactor()},
      {.field = choice_field(AT(optimizer.state_dtype), state_dtypes()),
       .example_json = R"("bf16")",
       .doc = "How moments and momentum are kept. What is rounded is right on average, and the same on every number of "
              "ranks.",
       .cost = "Fewer bytes: a smaller and faster step, and noise in the moments."},
      {.field = parameter_groups_field(),
       .example_json = R"([{"match": ["*.bias", "*norm*"], "max_dim": 1, "weight_decay": 0.0, "lr_ratio": 0.5}])",
       .doc = "Parameters that are updated with other numbers than the rest. Each pattern must fit some parameter, and "
              "a parameter may be in one group only.",
       .cost = "None: they are updated in the same pass."},
      {.pointer = "/optimizer/shard_over",
       .field = choice_field(AT(optimizer.shard_over_world), shard_overs()),
       .example_json = R"("world")",
       .doc = "Which ranks share the optimizer state between them.",
       .cost = "world: less memory, and after each step parameters are gathered across the replicate axis too.",
       .only_if = with_value(AT(strategy), "HYBRID_SHARD", ShardingStrategy::kHybridShard)},
      {.field = boolean_field(AT(optimizer.in_backward)),
       .example_json = "true",
       .doc = "A unit is updated as soon as its gradients are summed, while backward goes on with the next. Gradients "
              "of only a few units are in memory at a time, and what lies on disk moves while backward computes. The "
              "bits are those of an update after backward. A GPU's masters and moments in its host's memory move "
              "meanwhile too: with a \"queue_depth\" of offload that is enough for what moves in a unit's backward, "
              "nothing waits for them but the bus.",
       .cost = "Nothing can be skipped or taken back: a gradient that is infinite or NaN ends the run, and parameters "
               "cannot be read between backward and step. With lamb and lars ranks meet once a unit about its layers' "
               "norms, in place of once a step. With muon, adafactor and own_matrix they exchange the matrices of one "
               "unit at a time, which are dealt less evenly than those of several; under adafactor and own_matrix a "
               "GPU's host waits for the GPU once a unit."},
  };
}

std::vector<StrategyKey> ema_keys() {
  return {
      {.field = number_field(AT(ema.decay), {0, 1, false, true}),
       .example_json = "0.999",
       .doc =
           "Share of the average that each step keeps; the rest is the new weight's. It begins as a copy of the "
           "weights after the run's first step, as torch.optim.swa_utils.AveragedModel does. 0: there is no average.",
       .cost = "4 bytes a parameter, sharded and offloaded as optimizer states are; moved in the optimizer's pass."}};
}

}  // namespace tessera
