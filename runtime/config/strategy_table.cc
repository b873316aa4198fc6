#include "runtime/config/strategy_table.h"

#include <algorithm>

#include "runtime/config/strategy_fields.h"

namespace tessera {
namespace {

// `AT(optimizer.lr)` finds a member in a Strategy and in a const Strategy.
#define AT(member) \
  [](auto& strategy) -> auto& { return strategy.member; }

constexpr double kMany = 1e12;
constexpr double kWeekInSeconds = 7 * 24 * 3600;

Condition with_optimizer(std::string text, std::function<bool(OptimizerType)> holds) {
  return {std::move(text), {"/optimizer/type"}, [holds](const Strategy& s) { return holds(s.optimizer.type); }};
}
Condition with_sgd() {
  return with_optimizer("optimizer.type sgd", [](OptimizerType type) { return type == OptimizerType::kSgd; });
}
Condition with_adam() {
  return with_optimizer("optimizer.type adamw or adam", [](OptimizerType type) { return type != OptimizerType::kSgd; });
}

Condition with_schedule(std::string text, std::vector<LrScheduleType> types) {
  return {"lr_schedule.type " + std::move(text), {"/lr_schedule/type"}, [types](const Strategy& s) {
            return std::find(types.begin(), types.end(), s.lr_schedule.type) != types.end();
          }};
}

Condition with_warmup_share() {
  return {"lr_schedule.type one_cycle and warmup_steps 0",
          {"/lr_schedule/type", "/lr_schedule/warmup_steps"},
          [](const Strategy& s) {
            return s.lr_schedule.type == LrScheduleType::kOneCycle && s.lr_schedule.warmup_steps == 0;
          }};
}

Condition with_loss_scale() {
  return {"mixed_precision.param fp16", {"/mixed_precision/param"}, [](const Strategy& s) {
            return s.mixed_precision.param == DType::kF16;
          }};
}
Condition with_dynamic_loss_scale() {
  return {
      "mixed_precision.param fp16 and loss_scale.dynamic true",
      {"/mixed_precision/param", "/mixed_precision/loss_scale/dynamic"},
      [](const Strategy& s) { return s.mixed_precision.param == DType::kF16 && s.mixed_precision.loss_scale.dynamic; }};
}

std::vector<StrategyKey> sharding_keys() {
  return {
      {.pointer = "/strategy",
       .field = choice_field(AT(strategy), sharding_strategies()),
       .default_json = R"("FULL_SHARD")",
       .example_json = R"("SHARD_GRAD_OP")",
       .doc = "How parameters, gradients and optimizer state are spread over the ranks.",
       .cost = "Each name further down the list needs less memory; the last three communicate parameters too."},
      {.pointer = "/mesh/replicate",
       .field = integer_field(AT(mesh.replicate)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "1",
       .doc = "Length of the replicate axis. 0: the number of hosts for HYBRID_SHARD, else 1.",
       .cost = "Memory: every replica holds a full set of shards."},
      {.pointer = "/mesh/shard",
       .field = integer_field(AT(mesh.shard)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "4",
       .doc = "Length of the shard axis; replicate x shard is the world size. 0: the world size over replicate.",
       .cost = "Communication: gathers span more ranks, perhaps across hosts."},
      {.pointer = "/units/classes",
       .field = names_field(AT(units.classes)),
       .default_json = "[]",
       .example_json = R"(["Block"])",
       .doc = "Classes whose modules become units, without namespace and \"Impl\". What no unit claims "
              "belongs to "
              "the root unit.",
       .cost = "More, smaller units: less memory, more and shorter collectives."},
      {.pointer = "/units/modules",
       .field = names_field(AT(units.modules)),
       .default_json = "[]",
       .example_json = R"(["layers.0", "layers.1"])",
       .doc = "Paths of modules that become units, beside those of classes.",
       .cost = "As for classes."},
      {.pointer = "/units/min_numel",
       .field = integer_field(AT(units.min_numel)),
       .range = {0, kMany},
       .unit = "elements",
       .default_json = "0",
       .example_json = "1000000",
       .doc = "Above 0: split the model bottom-up into units of at least so many parameters.",
       .cost = "Memory: larger units are gathered at once."},
      {.pointer = "/units/bucket_cap_mb",
       .field = optional_number_field(AT(units.bucket_cap_mb)),
       .range = {0, 1e6},
       .unit = "MiB",
       .default_json = "null",
       .example_json = "25",
       .doc = "Makes buckets the units of NO_SHARD: parameters in reverse order of registration, up to so many MiB of "
              "gradients in the reduce type each; a larger parameter is a bucket by itself. 0: one parameter a bucket. "
              "null: units by classes, modules and min_numel.",
       .cost = "Fewer, longer collectives; with a reduce type other than fp32, memory for larger buckets."},
      {.pointer = "/units/first_bucket_mb",
       .field = number_field(AT(units.first_bucket_mb)),
       .range = {0, 1e6, true},
       .unit = "MiB",
       .default_json = "1.0",
       .example_json = "0.5",
       .doc = "The bucket that backward completes first holds at most so much, and at most bucket_cap_mb.",
       .cost = "Its reduction can begin later.",
       .only_if = {"units.bucket_cap_mb above 0",
                   {"/units/bucket_cap_mb"},
                   [](const Strategy& s) { return s.units.bucket_cap_mb.value_or(0) > 0; }}},
      {.pointer = "/prefetch",
       .field = integer_field(AT(prefetch)),
       .range = {0, 1024},
       .unit = "units",
       .default_json = "1",
       .example_json = "2",
       .doc = "At most so many units are gathered ahead of their use.",
       .cost = "Memory: one more gathered unit each."},
      {.pointer = "/host_sharing",
       .field = boolean_field(AT(host_sharing)),
       .default_json = "true",
       .example_json = "false",
       .doc =
           "Where the ranks of a shard group are on one host and the optimizer is sharded, they hold one copy of the "
           "parameters together, in memory that all of them map; each updates its part in place, and a barrier a step "
           "takes the place of all gathers.",
       .cost = "None. false: private copies, gathered unit by unit as between hosts."},
  };
}

std::vector<StrategyKey> precision_keys() {
  return {
      {.pointer = "/mixed_precision/param",
       .field = choice_field(AT(mixed_precision.param), training_dtypes()),
       .default_json = R"("fp32")",
       .example_json = R"("bf16")",
       .doc = "Type of gathered parameters, and so of forward and backward. Master weights are always fp32.",
       .cost = "Types of 2 bytes halve gathers and activations, and cost precision."},
      {.pointer = "/mixed_precision/reduce",
       .field = choice_field(AT(mixed_precision.reduce), training_dtypes()),
       .default_json = R"("fp32")",
       .example_json = R"("bf16")",
       .doc = "Type of gradients on the wire. Sums are accumulated in fp32 whatever it is.",
       .cost = "Types of 2 bytes halve the reduction, and round every gradient once more."},
      {.pointer = "/mixed_precision/master",
       .field = choice_field(AT(mixed_precision.master), master_kinds()),
       .default_json = R"("split")",
       .example_json = R"("fp32")",
       .doc = "How the fp32 master weights of bf16 parameters are kept. Nothing is lost either way.",
       .cost = "fp32: 2 bytes a parameter more, for bf16 parameters that are rounded as PyTorch rounds them.",
       .only_if = {"mixed_precision.param bf16",
                   {"/mixed_precision/param"},
                   [](const Strategy& s) { return s.mixed_precision.param == DType::kBF16; }}},
      {.pointer = "/mixed_precision/keep_fp32",
       .field = names_field(AT(mixed_precision.keep_fp32)),
       .default_json = R"(["BatchNorm"])",
       .example_json = R"(["BatchNorm", "Router"])",
       .doc = "Classes (by the beginning of their name) whose parameters stay fp32.",
       .cost = "Memory and communication: 4 bytes a parameter instead of 2."},
      {.pointer = "/mixed_precision/loss_scale/dynamic",
       .field = boolean_field(AT(mixed_precision.loss_scale.dynamic)),
       .default_json = "true",
       .example_json = "true",
       .doc = "Let the scale follow the gradients (arXiv 1710.03740, section 3.2). false: it stays at initial.",
       .cost = "A step that overflows is skipped.",
       .only_if = with_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/initial",
       .field = number_field(AT(mixed_precision.loss_scale.initial)),
       .range = {0, 4294967296.0, true},
       .default_json = "65536.0",
       .example_json = "32768",
       .doc = "The scale of the first step.",
       .cost = "Too high: the first steps overflow and are skipped. Too low: small gradients vanish.",
       .only_if = with_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/growth_factor",
       .field = number_field(AT(mixed_precision.loss_scale.growth_factor)),
       .range = {1, 1024, true},
       .default_json = "2.0",
       .example_json = "2",
       .doc = "The scale is multiplied by it after growth_interval finite steps.",
       .cost = "More overflows.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/backoff_factor",
       .field = number_field(AT(mixed_precision.loss_scale.backoff_factor)),
       .range = {0, 1, true, true},
       .default_json = "0.5",
       .example_json = "0.5",
       .doc = "The scale is multiplied by it after an overflow.",
       .cost = "Nearer to 1: more steps are skipped until the scale fits.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/growth_interval",
       .field = integer_field(AT(mixed_precision.loss_scale.growth_interval)),
       .range = {1, kMany},
       .unit = "steps",
       .default_json = "2000",
       .example_json = "1000",
       .doc = "Finite steps in a row before the scale grows.",
       .cost = "The scale recovers more slowly.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/hysteresis",
       .field = integer_field(AT(mixed_precision.loss_scale.hysteresis)),
       .range = {1, kMany},
       .unit = "steps",
       .default_json = "1",
       .example_json = "2",
       .doc = "Overflows in a row before the scale falls.",
       .cost = "More skipped steps while the scale is too high.",
       .only_if = with_dynamic_loss_scale()},
      {.pointer = "/mixed_precision/loss_scale/minimum",
       .field = number_field(AT(mixed_precision.loss_scale.minimum)),
       .range = {0, 4294967296.0, true},
       .default_json = "1.0",
       .example_json = "1",
       .doc = "The scale never falls below it.",
       .cost = "Above what the gradients allow, every step overflows.",
       .only_if = with_dynamic_loss_scale()},
  };
}

std::vector<StrategyKey> step_keys() {
  return {
      {.pointer = "/gradient_accumulation",
       .field = integer_field(AT(gradient_accumulation)),
       .range = {1, 1e6},
       .unit = "microbatches",
       .default_json = "1",
       .example_json = "4",
       .doc = "Microbatches whose gradients make one step.",
       .cost = "Time of a step; the global batch grows with it."},
      {.pointer = "/gradient_sync",
       .field = choice_field(AT(gradient_sync), gradient_syncs()),
       .default_json = R"("each_microbatch")",
       .example_json = R"("last_microbatch")",
       .doc = "When gradients are reduced under gradient accumulation. The same with one microbatch a step.",
       .cost = "last_microbatch: 4 bytes a parameter, unsharded."},
      {.pointer = "/gradient_clipping",
       .field = number_field(AT(gradient_clipping)),
       .range = {0, 1e30},
       .default_json = "0.0",
       .example_json = "1.0",
       .doc = "Largest 2-norm of all gradients together; longer ones are scaled down to it. 0: off.",
       .cost = "None in time. Too low a limit slows learning."},
  };
}

std::vector<StrategyKey> optimizer_keys() {
  return {
      {.pointer = "/optimizer/type",
       .field = choice_field(AT(optimizer.type), optimizer_types()),
       .default_json = R"("adamw")",
       .example_json = R"("sgd")",
       .doc = "The update rule.",
       .cost = "Numbers of state_dtype a parameter beside the master weight: adamw and adam 2, sgd with momentum "
               "1, sgd 0."},
      {.pointer = "/optimizer/lr",
       .field = number_field(AT(optimizer.lr)),
       .range = {0, 1000},
       .default_json = "0.001",
       .example_json = "3e-4",
       .doc = "Learning rate; the peak of the schedule.",
       .cost = "Too high: the loss diverges."},
      {.pointer = "/optimizer/betas",
       .field = number_pair_field(AT(optimizer.beta1), AT(optimizer.beta2)),
       .range = {0, 1, false, true},
       .default_json = "[0.9, 0.999]",
       .example_json = "[0.9, 0.95]",
       .doc = "Decay of the running mean of gradients, and of their squares.",
       .cost = "A longer memory: slower to follow a change.",
       .only_if = with_adam()},
      {.pointer = "/optimizer/eps",
       .field = number_field(AT(optimizer.eps)),
       .range = {1e-30, 1},
       .default_json = "1e-08",
       .example_json = "1e-6",
       .doc = "Added to the root of the second moment.",
       .cost = "Smaller steps where gradients are small.",
       .only_if = with_adam()},
      {.pointer = "/optimizer/weight_decay",
       .field = number_field(AT(optimizer.weight_decay)),
       .range = {0, 1000},
       .default_json = "0.01",
       .example_json = "0.1",
       .doc = "Pull towards zero: decoupled for adamw, added to the gradient for adam and sgd.",
       .cost = "Too high: the model underfits."},
      {.pointer = "/optimizer/momentum",
       .field = number_field(AT(optimizer.momentum)),
       .range = {0, 1, false, true},
       .default_json = "0.0",
       .example_json = "0.9",
       .doc = "Decay of the running sum of gradients.",
       .cost = "Above 0: one number of state_dtype a parameter, sharded as the strategy says.",
       .only_if = with_sgd()},
      {.pointer = "/optimizer/dampening",
       .field = number_field(AT(optimizer.dampening)),
       .range = {0, 1},
       .default_json = "0.0",
       .example_json = "0.1",
       .doc = "The gradient enters the momentum times (1 - dampening).",
       .cost = "Smaller steps.",
       .only_if = with_sgd()},
      {.pointer = "/optimizer/nesterov",
       .field = boolean_field(AT(optimizer.nesterov)),
       .default_json = "false",
       .example_json = "true",
       .doc = "Nesterov's momentum: step along the gradient plus the momentum to come.",
       .cost = "None.",
       .only_if = with_sgd()},
      {.pointer = "/optimizer/state_dtype",
       .field = choice_field(AT(optimizer.state_dtype), state_dtypes()),
       .default_json = R"("fp32")",
       .example_json = R"("bf16")",
       .doc = "How moments and momentum are kept. What is rounded is right on average, and the same on every number of "
              "ranks.",
       .cost = "Fewer bytes: a smaller and faster step, and noise in the moments."},
      {.pointer = "/optimizer/shard_over",
       .field = choice_field(AT(optimizer.shard_over_world), shard_overs()),
       .default_json = R"("shard")",
       .example_json = R"("world")",
       .doc = "Which ranks share the optimizer state between them.",
       .cost = "world: less memory, and after each step parameters are gathered across the replicate axis too.",
       .only_if = {"strategy HYBRID_SHARD",
                   {"/strategy"},
                   [](const Strategy& s) { return s.strategy == ShardingStrategy::kHybridShard; }}},
  };
}

std::vector<StrategyKey> schedule_keys() {
  using enum LrScheduleType;
  return {
      {.pointer = "/lr_schedule/type",
       .field = choice_field(AT(lr_schedule.type), lr_schedule_types()),
       .default_json = R"("constant")",
       .example_json = R"("cosine")",
       .doc = "How the learning rate changes from step to step.",
       .cost = "None."},
      {.pointer = "/lr_schedule/warmup_steps",
       .field = integer_field(AT(lr_schedule.warmup_steps)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "500",
       .doc = "The rate rises over so many steps first: in a straight line from near 0; with one_cycle, from "
              "initial_ratio.",
       .cost = "Steps at a low rate."},
      {.pointer = "/lr_schedule/total_steps",
       .field = integer_field(AT(lr_schedule.total_steps)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "10000",
       .doc = "The step at which the schedule ends; the rate stays where it is afterwards.",
       .cost = "A slower fall.",
       .only_if = with_schedule("linear, cosine, one_cycle or wsd", {kLinear, kCosine, kOneCycle, kWsd})},
      {.pointer = "/lr_schedule/decay_steps",
       .field = integer_field(AT(lr_schedule.decay_steps)),
       .range = {0, kMany},
       .unit = "steps",
       .default_json = "0",
       .example_json = "1000",
       .doc = "Length of the final decay.",
       .cost = "Fewer steps at the full rate.",
       .only_if = with_schedule("wsd", {kWsd})},
      {.pointer = "/lr_schedule/min_ratio",
       .field = number_field(AT(lr_schedule.min_ratio)),
       .range = {0, 1},
       .default_json = "0.0",
       .example_json = "0.1",
       .doc = "Lowest rate as a share of optimizer.lr.",
       .cost = "A noisier end.",
       .only_if = with_schedule("other than constant", {kLinear, kCosine, kOneCycle, kInverseSqrt, kWsd})},
      {.pointer = "/lr_schedule/initial_ratio",
       .field = number_field(AT(lr_schedule.initial_ratio)),
       .range = {0, 1},
       .default_json = "0.04",
       .example_json = "0.1",
       .doc = "Rate at step 0 as a share of the peak.",
       .cost = "A rougher start.",
       .only_if = with_schedule("one_cycle", {kOneCycle})},
      {.pointer = "/lr_schedule/warmup_share",
       .field = number_field(AT(lr_schedule.warmup_share)),
       .range = {0, 1},
       .default_json = "0.3",
       .example_json = "0.25",
       .doc = "Share of total_steps spent rising.",
       .cost = "A steeper fall.",
       .only_if = with_warmup_share()},
      {.pointer = "/lr_schedule/base_batch_size",
       .field = integer_field(AT(lr_schedule.base_batch_size)),
       .range = {0, kMany},
       .unit = "samples",
       .default_json = "0",
       .example_json = "256",
       .doc = "Above 0: linear scaling, lr x (global batch / this) (arXiv 1706.02677).",
       .cost = "A lower rate."},
  };
}

std::vector<StrategyKey> platform_keys() {
  return {
      {.pointer = "/memory/limit",
       .field = bytes_field(AT(memory.limit_bytes)),
       .range = {0, 4611686018427387904.0},
       .unit = "bytes",
       .default_json = "0",
       .example_json = R"("8GiB")",
       .doc = "A plan that needs more memory a rank is refused before step 0. 0: no limit.",
       .cost = "None; it allocates nothing."},
      {.pointer = "/memory/tensor_heap",
       .field = boolean_field(AT(memory.tensor_heap)),
       .default_json = "true",
       .example_json = "false",
       .doc = "LibTorch's CPU tensors come from malloc, which reuses freed blocks, not from posix_memalign, which "
              "before glibc 2.38 seldom does. For the whole process, from the first Engine on.",
       .cost = "64 bytes a tensor. false: a heap of several times the live activations and gradients."},
      {.pointer = "/check/as_across_hosts",
       .field = boolean_field(AT(check.as_across_hosts)),
       .default_json = "false",
       .example_json = "true",
       .doc =
           "Where the ranks of a host hold one copy of the parameters, watches operators as if they did not, and "
           "refuses at the step what several hosts would refuse: a forward on some ranks only, another order of units.",
       .cost = "About half a microsecond an operator."},
      {.pointer = "/check/values",
       .field = boolean_field(AT(check.values)),
       .default_json = "false",
       .example_json = "true",
       .doc = "Hashes each rank's parameters after a step, and compares before they are used and updated: finds writes "
              "through .data() or a raw pointer outside Gathered(kWrite), which carry no version.",
       .cost = "Reads the rank's parameters twice a step, and gathered units twice more."},
      {.pointer = "/comm/transport",
       .field = choice_field(AT(comm.transport), transport_choices()),
       .default_json = R"("auto")",
       .example_json = R"("host")",
       .doc = "What carries the collectives.",
       .cost = "auto is the fastest that reaches every rank."},
      {.pointer = "/comm/nccl_buffers",
       .field = choice_field(AT(comm.nccl_buffers), nccl_buffers()),
       .default_json = R"("registered")",
       .example_json = R"("plain")",
       .doc = "How the memory is made that nccl gathers parameters from and into.",
       .cost = "registered: it is rounded up to what LibTorch and NCCL map at once (2 MiB; 20 MiB for up to 10)."},
      {.pointer = "/comm/timeout_s",
       .field = number_field(AT(comm.timeout_s)),
       .range = {0, kWeekInSeconds, true},
       .unit = "seconds",
       .default_json = "600.0",
       .example_json = "60",
       .doc = "A collective that takes longer is an error.",
       .cost = "A rank that died is noticed later."},
      {.pointer = "/comm/init_timeout_s",
       .field = number_field(AT(comm.init_timeout_s)),
       .range = {0, kWeekInSeconds, true},
       .unit = "seconds",
       .default_json = "300.0",
       .example_json = "120",
       .doc = "How long ranks wait for each other at the start.",
       .cost = "A rank that never started is noticed later."},
  };
}

#undef AT

std::vector<StrategyKey> all_keys() {
  std::vector<StrategyKey> all;
  for (auto part : {sharding_keys, precision_keys, step_keys, optimizer_keys, schedule_keys, platform_keys}) {
    for (StrategyKey& key : part()) all.push_back(std::move(key));
  }
  return all;
}

}  // namespace

const std::vector<StrategyKey>& strategy_keys() {
  static const std::vector<StrategyKey> keys = all_keys();
  return keys;
}

const std::vector<StrategyGroup>& strategy_groups() {
  static const std::vector<StrategyGroup> groups = {
      {"/mesh", "The ranks as a grid: replicate x shard."},
      {"/units", "Which modules are gathered together."},
      {"/mixed_precision", "Types of parameters and gradients."},
      {"/mixed_precision/loss_scale", "Loss scaling, which keeps small fp16 gradients from vanishing."},
      {"/optimizer", "The update of the master weights."},
      {"/lr_schedule", "The learning rate over time."},
      {"/memory", "What a rank may use."},
      {"/check", "Checks that cost something, for finding mistakes in a program."},
      {"/comm", "How ranks talk."}};
  return groups;
}

const std::vector<UnavailableKey>& unavailable_keys() {
  static const std::vector<UnavailableKey> keys = {
      {"/offload", "parameters or optimizer state in host memory or on NVMe"},
      {"/reproducible", "the same bits on any number of ranks"},
      {"/compression", "compressed gradients"},
      {"/checkpoint", "automatic checkpoints"}};
  return keys;
}

}  // namespace tessera
