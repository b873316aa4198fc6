#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/transport_rows.h"

namespace tessera {
namespace {

constexpr double kWeekInSeconds = 7 * 24 * 3600;

Condition with_replicas() {
  return {"a strategy under which ranks hold something alike (not FULL_SHARD or SHARD_GRAD_OP)",
          {"/strategy", "/placement/parameters", "/mesh/replicate", "/mesh/host"},
          holds_copies};
}

Condition over_network() {
  return {"comm.transport auto, gloo or mpi", {"/comm/transport"}, [](const Strategy& s) {
            return s.comm.transport == TransportChoice::kAuto || has(s.comm.transport, transport_traits::kBackground);
          }};
}

}  // namespace

std::vector<StrategyKey> platform_keys() {
  return {
      {.pointer = "/memory/limit",
       .field = bytes_field(AT(memory.limit_bytes), {0, kManyBytes}),
       .example_json = R"("8GiB")",
       .doc = "A plan that needs more memory a rank is refused before step 0. 0: no limit.",
       .cost = "None; it allocates nothing."},
      {.field = boolean_field(AT(memory.tensor_heap)),
       .example_json = "false",
       .doc = "LibTorch's CPU tensors come from malloc, which reuses freed blocks, not from posix_memalign, which "
              "before glibc 2.38 seldom does; and malloc keeps what tensors gave back for the next step's, unless the "
              "environment sets it (MALLOC_*, GLIBC_TUNABLES). For the whole process, from the first Engine on.",
       .cost = "64 bytes a tensor, and freed memory is not the system's between steps. false: a heap of several times "
               "the live activations and gradients, and page faults in each step."},
      {.field = boolean_field(AT(check.as_across_hosts)),
       .example_json = "true",
       .doc =
           "Where the ranks of a host hold one copy of the parameters, watches operators as if they did not, and "
           "refuses at the step what several hosts would refuse: a forward on some ranks only, another order of units.",
       .cost = "About half a microsecond an operator."},
      {.field = boolean_field(AT(check.values)),
       .example_json = "true",
       .doc = "Hashes each rank's parameters after a step, and compares before they are used and updated: finds writes "
              "through a raw pointer outside Gathered(kWrite), which carry no version. What a guard showed of sharded "
              "parameters is filled with NaN when it ends, so that arrays which are kept beyond it are found.",
       .cost = "Reads the rank's parameters twice a step, and gathered units twice more. On a GPU they are copied to "
               "the host for it, and the host waits."},
      {.field = integer_field(AT(check.replica_hash_every), {0, kMany}, "steps"),
       .example_json = "100",
       .doc = "After each so many steps ranks compare hashes of the parameters, masters and optimizer states that "
              "several of them hold alike. Where they differ, as after a bit flip in memory, training ends with an "
              "error that names the ranks and the parameter. 0: never.",
       .cost = "Such a step reads all of the rank's state once more.",
       .only_if = with_replicas()},
      {.field = choice_field(AT(comm.transport), transport_choices()),
       .example_json = R"("host")",
       .doc = "What carries the collectives.",
       .cost = "auto is the fastest that reaches every CPU rank. GPUs need nccl or cuda_host."},
      {.field = choice_field(AT(comm.nccl_buffers), nccl_buffers()),
       .example_json = R"("plain")",
       .doc = "How the memory is made that nccl gathers parameters from and into.",
       .cost = "registered: it is rounded up to what LibTorch and NCCL map at once (2 MiB; 20 MiB for up to 10)."},
      {.field = number_field(AT(comm.timeout_s), {0, kWeekInSeconds, true}, "seconds"),
       .example_json = "60",
       .doc = "A collective that takes longer is an error.",
       .cost = "A rank that died is noticed later."},
      {.field = number_field(AT(comm.init_timeout_s), {0, kWeekInSeconds, true}, "seconds"),
       .example_json = "120",
       .doc = "How long ranks wait for each other at the start.",
       .cost = "A rank that never started is noticed later."},
      {.field = number_field(AT(comm.outage_s), {9, kWeekInSeconds}, "seconds"),
       .example_json = "60",
       .doc = "How long the network between hosts may be out. Ranks wait that long for a host that gives no sign of "
              "life, and go on when it "
              "answers. A job on a network whose links flap raises it. comm.timeout_s ends a collective sooner if it "
              "is shorter.",
       .cost = "A host that lost its power is noticed later, about six seconds after this time.",
       .only_if = over_network()},
      {.field = name_field(AT(comm.network_fit)),
       .example_json = R"("measured")",
       .doc = "How all-gathers and reductions over gloo and mpi go. direct: a message from each rank to each other "
              "one. measured: when a group of ranks is joined, its calls are timed, and from then on each goes by "
              "the algorithm that costs least (ring, doubling, halving). Empty: so do calls of 16 KiB and more of "
              "three ranks or more on several hosts, if the measurement takes less than two seconds by its own "
              "estimate; all others go directly. Else a file with such costs, which rank 0 reads, and tessera bench"
              " collectives --fit-file writes. Changes no bits.",
       .cost = "Empty: up to two seconds at the start. measured: as much for each set of ranks, and calls below 16 "
               "KiB may then take longer.",
       .only_if = over_network()},
  };
}

}  // namespace tessera
