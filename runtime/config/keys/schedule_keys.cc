#include <algorithm>

#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

// This file has the rows of "lr_schedule".

namespace tessera {
namespace {

Condition with_schedule(std::string text, std::vector<LrScheduleType> types) {
  return {"lr_schedule.type " + std::move(text), {"/lr_schedule/type"}, [types](const Strategy& s) {
            return std::find(types.begin(), types.end(), s.lr_schedule.type) != types.end();
          }};
}

Condition with_any_schedule() {
  using enum LrScheduleType;
  return with_schedule("other than manual", {kConstant, kLinear, kCosine, kOneCycle, kInverseSqrt, kWsd});
}

Condition with_warmup() {
  return {
      "lr_schedule.warmup_steps, warmup_samples or warmup_epochs above 0, and a type other than manual and one_cycle",
      {"/lr_schedule/type", "/lr_schedule/warmup_steps", "/lr_schedule/warmup_samples", "/lr_schedule/warmup_epochs"},
      [](const Strategy& s) {
        const LrScheduleConfig& schedule = s.lr_schedule;
        const bool rises = schedule.warmup_steps > 0 || schedule.warmup_samples > 0 || schedule.warmup_epochs > 0;
        return rises && schedule.type != LrScheduleType::kManual && schedule.type != LrScheduleType::kOneCycle;
      }};
}

/// Holds for schedules whose rise may be counted in samples. The fall of inverse_sqrt and one_cycle must begin where
/// the rise ends, so these two schedules count the rise in steps.
Condition with_rise_over_samples() {
  using enum LrScheduleType;
  return with_schedule("constant, linear, cosine or wsd", {kConstant, kLinear, kCosine, kWsd});
}

Condition with_warmup_share() {
  return {"lr_schedule.type one_cycle and warmup_steps 0",
          {"/lr_schedule/type", "/lr_schedule/warmup_steps"},
          [](const Strategy& s) {
            return s.lr_schedule.type == LrScheduleType::kOneCycle && s.lr_schedule.warmup_steps == 0;
          }};
}

}  // namespace

std::vector<StrategyKey> schedule_keys() {
  using enum LrScheduleType;
  return {
      {.field = choice_field(AT(lr_schedule.type), lr_schedule_types()),
       .example_json = R"("cosine")",
       .doc = "How the learning rate changes from step to step.",
       .cost = "None."},
      {.field = integer_field(AT(lr_schedule.warmup_steps), {0, kMany}, "steps"),
       .example_json = "500",
       .doc = "The rate rises over so many steps first: in a straight line from near 0, or from warmup_from; with "
              "one_cycle, from initial_ratio.",
       .cost = "Steps at a low rate.",
       .only_if = with_any_schedule()},
      {.field = integer_field(AT(lr_schedule.warmup_samples), {0, kMany}, "samples"),
       .example_json = "128000",
       .doc = "The rate rises over so many samples of all ranks first, whatever the batch: a factor beside that of the "
              "schedule, which goes on meanwhile. backward takes the number of samples.",
       .cost = "Steps at a low rate.",
       .only_if = with_rise_over_samples()},
      {.field = number_field(AT(lr_schedule.warmup_epochs), {0, 1e6}, "epochs"),
       .example_json = "5.0",
       .doc = "The same in epochs of epoch_samples.",
       .cost = "Steps at a low rate.",
       .only_if = with_rise_over_samples()},
      {.field = integer_field(AT(lr_schedule.epoch_samples), {0, kMany}, "samples"),
       .example_json = "1281167",
       .doc = "Samples of an epoch, over all ranks. 0: the program says it (Engine::set_epoch_samples), and `tessera "
              "train` does.",
       .cost = "None.",
       .only_if = when_above_0(AT(lr_schedule.warmup_epochs))},
      {.field = number_field(AT(lr_schedule.warmup_from), {0, 1}),
       .example_json = "0.1",
       .doc = "Rate at step 0 as a share of the peak. 0: the first of warmup_steps + 1 equal steps up from 0, or with "
              "samples the step's own as a share of them all.",
       .cost = "A rougher start.",
       .only_if = with_warmup()},
      {.field = integer_field(AT(lr_schedule.total_steps), {0, kMany}, "steps"),
       .example_json = "10000",
       .doc = "The step at which the schedule ends; the rate stays where it is afterwards.",
       .cost = "A slower fall.",
       .only_if = with_schedule("linear, cosine, one_cycle or wsd", {kLinear, kCosine, kOneCycle, kWsd})},
      {.field = integer_field(AT(lr_schedule.decay_steps), {0, kMany}, "steps"),
       .example_json = "1000",
       .doc = "Length of the final decay.",
       .cost = "Fewer steps at the full rate.",
       .only_if = with_schedule("wsd", {kWsd})},
      {.field = number_field(AT(lr_schedule.min_ratio), {0, 1}),
       .example_json = "0.1",
       .doc = "Lowest rate as a share of optimizer.lr.",
       .cost = "A noisier end.",
       .only_if = with_schedule("other than constant and manual", {kLinear, kCosine, kOneCycle, kInverseSqrt, kWsd})},
      {.field = number_field(AT(lr_schedule.initial_ratio), {0, 1}),
       .example_json = "0.1",
       .doc = "Rate at step 0 as a share of the peak.",
       .cost = "A rougher start.",
       .only_if = with_schedule("one_cycle", {kOneCycle})},
      {.field = number_field(AT(lr_schedule.warmup_share), {0, 1}),
       .example_json = "0.25",
       .doc = "Share of total_steps spent rising.",
       .cost = "A steeper fall.",
       .only_if = with_warmup_share()},
      {.field = integer_field(AT(lr_schedule.base_batch_size), {0, kMany}, "samples"),
       .example_json = "256",
       .doc = "Above 0: optimizer.lr is the rate for a global batch of this size. It grows with the batch, as "
              "batch_scaling says. backward takes the number of samples. Between outer steps (sync) the global batch "
              "is this replica's, times the number of replicas.",
       .cost = "A lower rate.",
       .only_if = with_any_schedule()},
      {.field = choice_field(AT(lr_schedule.batch_scaling), batch_scalings()),
       .example_json = R"("square_root")",
       .doc = "What global batch / base_batch_size does to the rate.",
       .cost = "A lower rate for large batches.",
       .only_if = when_above_0(AT(lr_schedule.base_batch_size))},
  };
}

}  // namespace tessera
