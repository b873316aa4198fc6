#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {

std::vector<StrategyKey> durable_keys() {
  return {
      {.field = integer_field(AT(durable.every), {0, kMany}, "steps"),
       .example_json = "10",
       .doc = "After so many steps all that training goes on from is on this host's disk, and a run that ended at any "
              "moment goes on from there, bit for bit, with the same model, strategy and ranks. tessera train does it; "
              "a program calls commit_durable after each step. A commit is written beside the next forward and "
              "backward. 0: never.",
       .cost = "A write of what of this rank's state lies in memory and has changed (of a GPU in its memory and in its "
               "host's), twice that on disk, and twice what lies in files anyway, which is not written again. The plan "
               "says how much."},
      {.field = name_field(AT(durable.dir)),
       .example_json = R"("/mnt/nvme0/run-a")",
       .doc = "The folder for that, on a local disk of each host, for one run alone.",
       .cost = "None.",
       .only_if = when_above_0(AT(durable.every))},
  };
}

}  // namespace tessera
