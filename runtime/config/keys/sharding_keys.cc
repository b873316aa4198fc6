#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {

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
       .doc = "Length of the replicate axis. 0: the number of hosts for HYBRID_SHARD and for a placement by axes, else "
              "1.",
       .cost = "Memory: every replica holds a full set of shards."},
      {.pointer = "/mesh/shard",
       .field = integer_field(AT(mesh.shard)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "4",
       .doc = "Length of the shard axis; replicate x shard is the world size. 0: the world size over replicate.",
       .cost = "Communication: gathers span more ranks, perhaps across hosts."},
      {.pointer = "/mesh/host",
       .field = integer_field(AT(mesh.host)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "2",
       .doc = "mesh.replicate by the name that placement has for this axis: ranks at the same place of several hosts. "
              "0: not given.",
       .cost = "As for replicate."},
      {.pointer = "/mesh/rank",
       .field = integer_field(AT(mesh.rank)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "4",
       .doc = "mesh.shard by the name that placement has for this axis: the ranks of a host. 0: not given.",
       .cost = "As for shard."},
      {.pointer = "/placement/parameters",
       .field = axes_field(AT(placement.parameters)),
       .default_json = "null",
       .example_json = R"(["rank"])",
       .doc =
           "Axes over which parameters are cut; each unit is gathered when it is used. []: every rank has them whole.",
       .cost = "Each axis less needs more memory, and fewer gathers."},
      {.pointer = "/placement/gradients",
       .field = axes_field(AT(placement.gradients)),
       .default_json = "null",
       .example_json = R"(["rank"])",
       .doc =
           "Axes over which sums of gradients are cut. Along these they are made by reduce-scatter, along the others "
           "by all-reduce.",
       .cost = "Each axis less needs more memory."},
      {.pointer = "/placement/optimizer",
       .field = axes_field(AT(placement.optimizer)),
       .default_json = "null",
       .example_json = R"(["host", "rank"])",
       .doc =
           "Axes over which masters and optimizer state are cut. Along those that do not cut parameters too, updated "
           "parameters are gathered after a step.",
       .cost = "Each axis less needs more memory, and more ranks make the same update."},
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
      {.pointer = "/units/ignored",
       .field = names_field(AT(units.ignored)),
       .default_json = "[]",
       .example_json = R"(["adapter.*"])",
       .doc = "Patterns of names of parameters that are left to the program, * and ? as in file names. Each rank has "
              "them whole, in their own "
              "type. Their gradients are this rank's own, in .grad as LibTorch makes them, and no step averages, clips "
              "or applies them. As "
              "buffers, they begin as rank 0's, and checkpoints have them.",
       .cost = "Memory: they are not sharded, and the plan counts them as little as buffers."},
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
      {.pointer = "/prefetch_bytes",
       .field = bytes_field(AT(prefetch_bytes)),
       .range = {0, 4611686018427387904.0},
       .unit = "bytes",
       .default_json = "0",
       .example_json = R"("64MiB")",
       .doc =
           "Above 0, in place of prefetch: units are gathered ahead as long as they hold no more than so many bytes, "
           "counted as if each were as large as the largest but the root; one at least.",
       .cost = "Memory: so much more, and a unit.",
       .only_if = {"prefetch 1", {"/prefetch"}, [](const Strategy& s) { return s.prefetch == 1; }}},
      {.pointer = "/reductions_ahead",
       .field = optional_integer_field(AT(reductions_ahead)),
       .range = {0, 16},
       .unit = "units",
       .default_json = "null",
       .example_json = "2",
       .doc =
           "Gradients of at most so many units are summed over the ranks while those of the next ones are computed. "
           "null: over "
           "a network one, on one host what fits 8 MiB, and as many as possible where it costs no memory. Ranks of one "
           "host that reduce over two axes wait for each sum, and a GPU has one or two, whatever is said here. Under "
           "reproducible, ranks wait for each unit where they send sums of subtrees, as plan then says.",
       .cost = "Memory: a bucket each, of the largest unit's gradients in the reduce type."},
      {.pointer = "/host_sharing",
       .field = boolean_field(AT(host_sharing)),
       .default_json = "true",
       .example_json = "false",
       .doc =
           "Where the ranks of a shard group are on one host and the optimizer is sharded, they hold one copy of the "
           "parameters together, in memory that all of them map; each updates its part in place, and a barrier a step "
           "takes the place of all gathers.",
       .cost = "None. false: private copies, gathered unit by unit as between hosts."},
      {.pointer = "/secondary/form",
       .field = choice_field(AT(secondary.form), secondary_forms()),
       .default_json = R"("none")",
       .example_json = R"("plain")",
       .doc =
           "How ranks keep a second copy of sharded parameters. The first gather of a unit after an update is over the "
           "whole shard axis and fills the copy; every later one of that step, backward's among them, is between the "
           "few ranks that hold the copy together.",
       .cost =
           "Memory: parameters of all units but the root divided by secondary.ranks; int8: a byte an element in place "
           "of 2 or 4, the root's too, and the codes of the largest unit."},
      {.pointer = "/secondary/ranks",
       .field = integer_field(AT(secondary.ranks)),
       .range = {0, 1e6},
       .unit = "ranks",
       .default_json = "0",
       .example_json = "4",
       .doc = "How many neighbouring ranks of the shard axis hold one copy together. 0: the ranks of a host.",
       .cost = "More: less memory, and gathers between more ranks.",
       .only_if = {"secondary.form other than none",
                   {"/secondary/form"},
                   [](const Strategy& s) { return s.secondary.is_used(); }}},
  };
}

}  // namespace tessera
