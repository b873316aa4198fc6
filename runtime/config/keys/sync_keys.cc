#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

namespace tessera {
namespace {

Condition with_outer_steps() {
  return {"a sync.type of outer steps", {"/sync/type"}, [](const Strategy& s) { return s.sync.makes_outer_steps(); }};
}

Condition when_asynchronous() { return with_value(AT(sync.type), "asynchronous", SyncType::kAsynchronous); }

Condition with_servers() {
  return {
      "sync.owners servers", {"/sync/type", "/sync/owners"}, [](const Strategy& s) { return s.sync.has_servers(); }};
}

Condition with_adaptive_lambda() {
  return {"sync.delay_compensation.adaptive true", {"/sync/delay_compensation/adaptive"}, [](const Strategy& s) {
            return s.sync.asynchronous.delay_compensation.adaptive;
          }};
}

Condition when_hogwild() { return with_value(AT(sync.type), "hogwild", SyncType::kHogwild); }

Condition with_backups() { return with_value(AT(sync.type), "backups", SyncType::kBackups); }

Condition with_outer_optimizer() {
  return {"sync.type diloco or streaming_diloco", {"/sync/type"}, [](const Strategy& s) {
            return s.sync.has_outer_optimizer();
          }};
}

Condition with_fragments() { return with_value(AT(sync.type), "streaming_diloco", SyncType::kStreamingDiloco); }

}  // namespace

std::vector<StrategyKey> sync_keys() {
  return {
      {.field = choice_field(AT(sync.type), sync_types()),
       .example_json = R"("diloco")",
       .doc = "How replicas stay one model. But with each_step, asynchronous, backups and hogwild nothing goes over "
              "the replicate axis between two outer steps: loss, norm, clipping and skipped steps are a replica's. A "
              "save makes an outer step if one is due, then averages optimizer states over replicas and goes on with "
              "those. A GPU does all of it in its own memory, with the CPU's bits.",
       .cost = "Replicas differ between outer steps, which slows learning. Memory: 4 bytes for each parameter of the "
               "largest unit; with diloco and streaming_diloco 8 more for each of this rank's master weights; with "
               "asynchronous and backups 4 for each of these, and none for the largest unit; with hogwild what "
               "sync.states says."},
      {.field = integer_field(AT(sync.every), {0, kMany}, "steps"),
       .example_json = "20",
       .doc = "Steps from one outer step to the next; of a fragment, with streaming_diloco.",
       .cost = "Larger: fewer bytes, and replicas that differ more.",
       .only_if = with_outer_steps()},
      {.field = integer_field(AT(sync.start_step), {0, kMany}, "steps"),
       .example_json = "1000",
       .doc = "So many steps are made as each_step makes them, first: replicas that train by themselves from the first "
              "step learn less. Then the Engine plans anew.",
       .cost = "Each of these steps sums gradients over replicas. While the Engine plans anew, both plans' memory is "
               "in use.",
       .only_if = with_outer_steps()},
      {.field = integer_field(AT(sync.fragments), {1, 4096}),
       .example_json = "2",
       .doc = "The model is cut in so many fragments: unit i is of fragment i modulo fragments. Each is sent in every "
              "`every` steps once, one behind the other.",
       .cost = "More: less is sent at a time, and less memory is needed for it.",
       .only_if = with_fragments()},
      {.field = integer_field(AT(sync.delay), {0, kMany}, "steps"),
       .example_json = "2",
       .doc = "From the step after which a fragment's outer gradients are sent to the one after which its weights "
              "change. With 0 that is at once, and nothing hides the wire.",
       .cost = "Memory: 4 bytes for each of this rank's master weights in the largest fragment.",
       .only_if = with_fragments()},
      {.field = number_field(AT(sync.mix), {0, 1, false, true}),
       .example_json = "0.0",
       .doc = "A fragment's new weights are mix times what the replica has, and 1 - mix times the outer weights: what "
              "the replica learned during the delay is not lost.",
       .cost = "With 0 these steps are lost. With more than 0 replicas are never the same.",
       .only_if = with_fragments()},
      {.field = number_field(AT(sync.outer.lr), {0, 1000}),
       .example_json = "0.5",
       .doc = "The outer optimizer's learning rate.",
       .cost = "None.",
       .only_if = with_outer_optimizer()},
      {.field = number_field(AT(sync.outer.momentum), {0, 1, false, true}),
       .example_json = "0.8",
       .doc = "Its Nesterov momentum.",
       .cost = "None.",
       .only_if = with_outer_optimizer()},
      {.pointer = "/sync/max_staleness",
       .field = optional_integer_field(AT(sync.asynchronous.max_staleness), {0, kMany}, "steps"),
       .example_json = "4",
       .doc =
           "No rank begins a step while it is more than so many steps ahead of the slowest one (arXiv 1312.7869). At 0 "
           "the updates of a round are applied in rank order, so a run has the same bits each time. null: no bound.",
       .cost = "Smaller: fresher gradients, and more waits for slow ranks.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/owners",
       .field = choice_field(AT(sync.asynchronous.owners), shard_owners()),
       .example_json = R"("servers")",
       .doc =
           "Whose the shards are: masters and states, to which gradients are applied as they come. With servers ranks "
           "may be on several hosts, and a rank that is killed stops no other; TESSERA_SERVERS names the servers.",
       .cost = "ranks: 4 bytes for each of this rank's master weights. servers: a step's gradients and parameters go "
               "over the network, behind backward and forward; with delay_compensation.lambda parameters go both ways. "
               "A server has 4 bytes for each of its master weights, and as much a state.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/elastic",
       .field = boolean_field(AT(sync.asynchronous.elastic)),
       .example_json = "true",
       .doc = "Workers join and leave a run that goes on. Each is a job of one rank (`tessera launch --workers 1:8`), "
              "and takes the values that the servers have. Server 0 deals the steps' data out, and that of a worker "
              "that ended again (Engine::take_step). The servers end the run, not its last worker.",
       .cost = "A question to server 0 in each step. A worker that ends amid a push has pushed a part of its step, and "
               "another worker makes the step again.",
       .only_if = with_servers()},
      {.pointer = "/sync/replica_ranks",
       .field = integer_field(AT(sync.asynchronous.replica_ranks), {1, 65535}, "ranks"),
       .example_json = "2",
       .doc =
           "Ranks that are one replica (DistBelief), such as those of a host: neighbours that step together, with the "
           "sum of their gradients and one loss and norm. Each of them sends the servers its part of the sum, fetches "
           "that part of the values, and gathers the others' from its neighbours.",
       .cost = "A sum of all gradients and a gather of all values among these ranks in each step. They wait for each "
               "other, and gradients leave when backward is over. Each sends and receives its share of the bytes.",
       .only_if = with_servers()},
      {.pointer = "/sync/scale",
       .field = choice_field(AT(sync.asynchronous.scale), age_scales()),
       .example_json = R"("inverse")",
       .doc = "What becomes of a gradient by its age: the updates that its shard got from other ranks since this rank "
              "pulled the values with which the gradient was made.",
       .cost = "With inverse, old gradients move parameters less.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/delay_compensation/lambda",
       .field = number_field(AT(sync.asynchronous.delay_compensation.lambda), {0, 1000}),
       .example_json = "0.04",
       .doc =
           "To each gradient g is added lambda * g * g * (the value now - the value that this rank pulled), element by "
           "element. The rank's own parameters are what it pulled, so it needs no further memory. 0: nothing is added.",
       .cost = "Another pass over gradients and two values of each parameter.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/delay_compensation/adaptive",
       .field = boolean_field(AT(sync.asynchronous.delay_compensation.adaptive)),
       .example_json = "true",
       .doc =
           "Divides lambda by sqrt(m + 1e-7), element by element, where m is a running mean of g * g over all updates "
           "of the shard (DC-ASGD-a). A checkpoint does not hold m: a run that goes on from one begins it at 0.",
       .cost = "Memory: 4 bytes for each of this rank's master weights. A square root and a division an element.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/delay_compensation/decay",
       .field = number_field(AT(sync.asynchronous.delay_compensation.decay), {0, 1, false, true}),
       .example_json = "0.9",
       .doc = "m becomes decay * m + (1 - decay) * g * g with each update.",
       .cost = "Larger: m follows the gradients more slowly.",
       .only_if = with_adaptive_lambda()},
      {.pointer = "/sync/states",
       .field = choice_field(AT(sync.asynchronous.states), state_sharings()),
       .example_json = R"("shared")",
       .doc = "Whose the optimizer's states are. A save averages states that each rank has for itself, and goes on "
              "with those.",
       .cost = "own: on each rank 4 bytes a state and parameter, instead of those over the number of ranks. shared: a "
               "state's update is lost where two ranks make one at the same time, and its cache lines go from core to "
               "core.",
       .only_if = when_hogwild()},
      {.pointer = "/sync/count",
       .field = integer_field(AT(sync.backups), {0, 65535}, "ranks"),
       .example_json = "1",
       .doc = "A step waits for the gradients of all ranks but so many (arXiv 1604.00981). What a rank has later than "
              "the others is dropped and counted, and it goes on with the next step. With 0 a run has the bits of "
              "each_step with gradient_sync last_microbatch.",
       .cost = "Larger: fewer waits for slow ranks, and a step that is made of fewer samples.",
       .only_if = with_backups()},
      {.pointer = "/sync/record_order",
       .field = name_field(AT(sync.asynchronous.record_order)),
       .example_json = R"("order.jsonl")",
       .doc = "A file that gets the order of all pushes and pulls, a line each. Empty: none.",
       .cost = "Some 100 bytes of the file for each pull and push of a shard, written 64 KiB at a time.",
       .only_if = when_asynchronous()},
      {.pointer = "/sync/play_order",
       .field = name_field(AT(sync.asynchronous.play_order)),
       .example_json = R"("order.jsonl")",
       .doc = "A file of record_order, or of tessera simulate --order, whose order this run keeps, so that it has the "
              "recorded run's bits. Each rank "
              "waits for its turn at each shard. Empty: none.",
       .cost = "Ranks wait for each other as in the recorded run, or longer.",
       .only_if = when_asynchronous()},
  };
}

}  // namespace tessera
