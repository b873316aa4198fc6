#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {

std::vector<StrategyKey> sharding_keys() {
  return {
      {.field = choice_field(AT(strategy), sharding_strategies()),
       .example_json = R"("SHARD_GRAD_OP")",
       .doc = "How parameters, gradients and optimizer state are spread over the ranks.",
       .cost = "Each name further down the list needs less memory; the last three communicate parameters too."},
      {.field = integer_field(AT(mesh.replicate), {0, 1e6}, "ranks"),
       .example_json = "1",
       .doc =
           "Length of the replicate axis. 0: the number of hosts for HYBRID_SHARD and for a placement by axes, else 1.",
       .cost = "Memory: every replica holds a full set of shards."},
      {.field = integer_field(AT(mesh.shard), {0, 1e6}, "ranks"),
       .example_json = "4",
       .doc = "Length of the shard axis; replicate x shard is the world size. 0: the world size over replicate.",
       .cost = "Communication: gathers span more ranks, perhaps across hosts."},
      {.field = integer_field(AT(mesh.host), {0, 1e6}, "ranks"),
       .example_json = "2",
       .doc = "mesh.replicate by the name that placement has for this axis: ranks at the same place of several hosts. "
              "0: not given.",
       .cost = "As for replicate."},
      {.field = integer_field(AT(mesh.rank), {0, 1e6}, "ranks"),
       .example_json = "4",
       .doc = "mesh.shard by the name that placement has for this axis: the ranks of a host. 0: not given.",
       .cost = "As for shard."},
      {.field = axes_field(AT(placement.parameters)),
       .example_json = R"(["rank"])",
       .doc =
           "Axes over which parameters are cut; each unit is gathered when it is used. []: every rank has them whole.",
       .cost = "Each axis less needs more memory, and fewer gathers."},
      {.field = axes_field(AT(placement.gradients)),
       .example_json = R"(["rank"])",
       .doc = "Axes over which sums of gradients are cut. Along these they are made by reduce-scatter, along the "
              "others by all-reduce.",
       .cost = "Each axis less needs more memory."},
      {.field = axes_field(AT(placement.optimizer)),
       .example_json = R"(["host", "rank"])",
       .doc = "Axes over which masters and optimizer state are cut. Along those that do not cut parameters too, "
              "updated parameters are gathered after a step.",
       .cost = "Each axis less needs more memory, and more ranks make the same update."},
      {.field = names_field(AT(units.classes)),
       .example_json = R"(["Block"])",
       .doc = "Classes whose modules become units, without namespace and \"Impl\". What no unit claims belongs to the "
              "root unit.",
       .cost = "More, smaller units: less memory, more and shorter collectives."},
      {.field = names_field(AT(units.modules)),
       .example_json = R"(["layers.0", "layers.1"])",
       .doc = "Paths of modules that become units, beside those of classes.",
       .cost = "As for classes."},
      {.field = integer_field(AT(units.min_numel), {0, kMany}, "elements"),
       .example_json = "1000000",
       .doc = "Above 0: split the model bottom-up into units of at least so many parameters.",
       .cost = "Memory: larger units are gathered at once."},
      {.field = names_field(AT(units.ignored)),
       .example_json = R"(["adapter.*"])",
       .doc =
           "Patterns of names of parameters that are left to the program, * and ? as in file names. Each rank has them "
           "whole, in their own type. Their gradients are this rank's own, in .grad as LibTorch makes them, and no "
           "step averages, clips or applies them. As buffers, they begin as rank 0's, and checkpoints have them.",
       .cost = "Memory: they are not sharded, and the plan counts them as little as buffers."},
      {.field = optional_number_field(AT(units.bucket_cap_mb), {0, 1e6}, "MiB"),
       .example_json = "25",
       .doc = "Makes buckets the units of NO_SHARD: parameters in reverse order of registration, up to so many MiB of "
              "gradients in the reduce type each; a larger parameter is a bucket by itself. 0: one parameter a bucket. "
              "null: units by classes, modules and min_numel.",
       .cost = "Fewer, longer collectives; with a reduce type other than fp32, memory for larger buckets."},
      {.field = number_field(AT(units.first_bucket_mb), {0, 1e6, true}, "MiB"),
       .example_json = "0.5",
       .doc = "The bucket that backward completes first holds at most so much, and at most bucket_cap_mb.",
       .cost = "Its reduction can begin later.",
       .only_if = when_above_0(AT(units.bucket_cap_mb))},
      {.field = integer_field(AT(prefetch), {0, 1024}, "units"),
       .example_json = "2",
       .doc = "At most so many units are gathered ahead of their use.",
       .cost = "Memory: one more gathered unit each."},
      {.field = bytes_field(AT(prefetch_bytes), {0, kManyBytes}),
       .example_json = R"("64MiB")",
       .doc = "Above 0, in place of prefetch: units are gathered ahead as long as they hold no more than so many "
              "bytes, counted as if each were as large as the largest but the root; one at least.",
       .cost = "Memory: so much more, and a unit.",
       .only_if = with_value(AT(prefetch), "1", 1)},
      {.field = optional_integer_field(AT(reductions_ahead), {0, 16}, "units"),
       .example_json = "2",
       .doc =
           "Gradients of at most so many units are summed over the ranks while those of the next ones are computed. "
           "null: over a network one, on one host what fits 8 MiB, and as many as possible where it costs no memory. "
           "Ranks of one host that reduce over two axes wait for each sum, and a GPU has one or two, whatever is said "
           "here. Under reproducible, ranks wait for each unit where they send sums of subtrees, as plan then says.",
       .cost = "Memory: a bucket each, of the largest unit's gradients in the reduce type."},
      {.field = boolean_field(AT(host_sharing)),
       .example_json = "false",
       .doc = "Where the ranks of a shard group are on one host and the optimizer is sharded, they hold one copy of "
              "the parameters together, in memory that all of them map; each updates its part in place, and a barrier "
              "a step takes the place of all gathers.",
       .cost = "None. false: private copies, gathered unit by unit as between hosts."},
      {.field = choice_field(AT(secondary.form), secondary_forms()),
       .example_json = R"("plain")",
       .doc = "How ranks keep a second copy of sharded parameters. The first gather of a unit after an update is over "
              "the whole shard axis and fills the copy; every later one of that step, backward's among them, is "
              "between the few ranks that hold the copy together.",
       .cost = "Memory: parameters of all units but the root divided by secondary.ranks; int8: a byte an element in "
               "place of 2 or 4, the root's too, and the codes of the largest unit."},
      {.field = integer_field(AT(secondary.ranks), {0, 1e6}, "ranks"),
       .example_json = "4",
       .doc = "How many neighbouring ranks of the shard axis hold one copy together. 0: the ranks of a host.",
       .cost = "More: less memory, and gathers between more ranks.",
       .only_if = {"secondary.form other than none",
                   {"/secondary/form"},
                   [](const Strategy& s) { return s.secondary.is_used(); }}},
  };
}

}  // namespace tessera
