#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

Condition with_spikes() {
  return {"on_spike.action skip or rollback", {"/on_spike/action"}, [](const Strategy& s) {
            return s.on_spike.action != SpikeAction::kNone;
          }};
}

}  // namespace

std::vector<StrategyKey> checkpoint_keys() {
  return {
      {.field = boolean_field(AT(checkpoint.async)),
       .example_json = "true",
       .doc = "save_checkpoint copies what this rank writes, and returns. A thread writes, syncs and commits the copy "
              "while training goes on. A save that failed is reported by the next step, save or load, on every rank.",
       .cost = "Memory: of what is sharded this rank's part of the fp32 masters and states, of what ranks hold alike "
               "their share of it. Time of one copy a save; the thread hashes, which takes a core while it does."},
      {.field = name_field(AT(checkpoint.dir)),
       .example_json = R"("checkpoints")",
       .doc = "The folder for checkpoints; empty: none. What tessera train saves to and resumes from; its flag "
              "--checkpoint-dir wins. A program saves by itself, and finds this and the keys below in "
              "Strategy::checkpoint.",
       .cost = "Disk: 12 bytes a parameter with adamw in fp32, for each checkpoint that stays."},
      {.field = integer_field(AT(checkpoint.every_steps), {0, kMany}),
       .example_json = "500",
       .doc = "tessera train saves after so many steps; 0: not by steps. Its flag --every-steps wins.",
       .cost = "More steps are lost when a run is killed."},
      {.field = number_field(AT(checkpoint.every_minutes), {0, 1e6}, "minutes"),
       .example_json = "30",
       .doc = "tessera train saves after so long, by rank 0's clock; 0: not by time. Its flag --every-minutes wins.",
       .cost = "As every_steps."},
      {.field = integer_field(AT(checkpoint.keep), {0, kMany}),
       .example_json = "3",
       .doc = "tessera train lets so many checkpoints stay, the newest; 0: all. Its flag --keep wins.",
       .cost = "Disk."},
      {.field = integer_field(AT(checkpoint.failures), {0, kMany}),
       .example_json = "2",
       .doc = "So many saves of tessera train may fail in a row (a full disk, for example), each with a warning. The "
              "next one that fails ends training with its error. The last save of a run must succeed.",
       .cost = "Steps are lost when a run is killed before a save succeeds."},
  };
}

std::vector<StrategyKey> spike_keys() {
  return {
      {.field = choice_field(AT(on_spike.action), spike_actions()),
       .example_json = R"("skip")",
       .doc = "What a step does whose loss, the mean over ranks and microbatches, is far above those before it: the "
              "median of the last steps' losses, in which spikes do not count. After half a window of spikes in a row "
              "the loss is taken to have changed for good: the step is made, and the window begins anew.",
       .cost = "One batch a spike; with rollback the steps since the last checkpoint too."},
      {.field = number_field(AT(on_spike.factor), {1, 1e6, /*open_least=*/true}),
       .example_json = "1.5",
       .doc = "A loss is a spike above so many times the median.",
       .cost = "Smaller spikes are trained on.",
       .only_if = with_spikes()},
      {.field = integer_field(AT(on_spike.window), {1, 10000}, "steps"),
       .example_json = "100",
       .doc = "The steps whose losses the median is of. Until as many have been made there is no spike.",
       .cost = "The median follows the loss later.",
       .only_if = with_spikes()},
  };
}

}  // namespace tessera
