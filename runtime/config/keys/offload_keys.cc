#include "runtime/config/strategy_fields.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/strategy_names.h"

// This file has the rows of "offload": first the conditions under which keys have an effect, then one row for each key.

namespace tessera {
namespace {

bool uses_nvme(const OffloadedState& state) { return state.tier == Tier::kNvme; }
bool takes_fraction(const OffloadedState& state) { return uses_nvme(state) || state.tier == Tier::kHost; }

bool has_state_below(const Strategy& s) {
  const OffloadConfig& offload = s.offload;
  return offload.parameters.tier != Tier::kMemory || offload.masters.tier != Tier::kMemory ||
         offload.moments.tier != Tier::kMemory;
}

Condition with_state_in_files() {
  return {"offload.parameters, masters or moments on tier nvme or auto",
          {"/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier"},
          [](const Strategy& s) {
            OffloadConfig state = s.offload;
            state.gradients = state.activations = Tier::kMemory;
            return state.uses_files();
          }};
}

Condition with_files() {
  return {"an offload tier nvme or auto",
          {"/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier", "/offload/gradients/tier",
           "/offload/activations/tier"},
          [](const Strategy& s) { return s.offload.uses_files(); }};
}

/// Holds if there are records whose size the strategy chooses. Gradients do not count, since they are read and written
/// a unit at a time.
Condition with_records_of_a_size() {
  return {"offload.parameters, masters or moments on a tier other than memory, or activations on nvme",
          {"/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier", "/offload/activations/tier"},
          [](const Strategy& s) { return has_state_below(s) || s.offload.activations == Tier::kNvme; }};
}

/// Returns true for tier auto too, which may choose the host.
bool has_state_on_host(const Strategy& s) {
  const auto may_be_on_host = [](const OffloadedState& state) {
    return state.tier == Tier::kHost || state.tier == Tier::kAuto;
  };
  return may_be_on_host(s.offload.masters) || may_be_on_host(s.offload.moments);
}

Condition with_state_on_host() {
  return {"offload.masters or moments on tier host or auto",
          {"/offload/masters/tier", "/offload/moments/tier"},
          has_state_on_host};
}

/// Holds if records are copied between their tier and the memory where they are used. State that the host's CPU updates
/// is not copied.
Condition with_a_queue() {
  return {
      "an offload tier other than memory, but of gradients, of parameters on host, and of masters and moments on host "
      "with step cpu",
      {"/offload/parameters/tier", "/offload/masters/tier", "/offload/moments/tier", "/offload/activations/tier",
       "/offload/step"},
      [](const Strategy& s) {
        const Tier parameters = s.offload.parameters.tier;
        const bool stays = has_state_on_host(s) && s.offload.step == OffloadedStep::kCpu;
        const bool has_states = s.offload.masters.tier != Tier::kMemory || s.offload.moments.tier != Tier::kMemory;
        return (parameters != Tier::kMemory && parameters != Tier::kHost) || (has_states && !stays) ||
               s.offload.activations != Tier::kMemory;
      }};
}

Condition with_narrow_parameters() {
  return {"mixed_precision.param bf16 or fp16", {"/mixed_precision/param"}, [](const Strategy& s) {
            return s.mixed_precision.param != DType::kF32;
          }};
}

Condition with_states() {
  return {"an optimizer with states", {"/optimizer/type", "/optimizer/momentum"}, [](const Strategy& s) {
            return keeps_states(s.optimizer);
          }};
}

}  // namespace

std::vector<StrategyKey> offload_keys() {
  return {
      {.field = choice_field(AT(offload.parameters.tier), tiers()),
       .example_json = R"("nvme")",
       .doc = "Where each rank's part of the parameters lies. Units are brought from there before they are used, ahead "
              "as \"prefetch\" says; ranks that share memory read each unit once together. Those of a GPU are not "
              "copied back to it for the update: its kernels change them in the host's memory, over the bus; or with "
              "offload.step cpu, and tier host, the host's CPU does.",
       .cost = "host, nvme: memory for units that are gathered only, on one rank too. host: two copies to the GPU a "
               "step for forward and backward, and what the update writes there, and reads if they are masters. nvme: "
               "two reads a step, and a read and a write for the update; on a GPU also the copies of host, and pinned "
               "memory for the parts of prefetch + 2 units."},
      {.field = number_field(AT(offload.parameters.fraction), {0, 1}),
       .example_json = "0.75",
       .doc = "Share of the parameters on that tier, as for masters.",
       .cost = "Traffic in proportion.",
       .only_if = {"offload.parameters.tier host or nvme",
                   {"/offload/parameters/tier"},
                   [](const Strategy& s) { return takes_fraction(s.offload.parameters); }}},
      {.field = choice_field(AT(offload.masters.tier), state_tiers()),
       .example_json = R"("nvme")",
       .doc = "Where masters lie. Parameters that are fp32 are the masters: they lie where parameters do.",
       .cost = "host, nvme: 2 or 4 bytes a parameter less memory of the device that trains; as many are read and "
               "written a step; with host as offload.step says.",
       .only_if = with_narrow_parameters()},
      {.field = number_field(AT(offload.masters.fraction), {0, 1}),
       .example_json = "0.75",
       .doc = "Share of the masters on that tier, rounded up to whole records of each unit. The others stay in memory.",
       .cost = "Traffic in proportion.",
       .only_if = {"offload.masters.tier host or nvme",
                   {"/offload/masters/tier"},
                   [](const Strategy& s) { return takes_fraction(s.offload.masters); }}},
      {.field = choice_field(AT(offload.moments.tier), state_tiers()),
       .example_json = R"("nvme")",
       .doc = "Where optimizer states lie.",
       .cost = "host, nvme: with adamw 8 bytes a parameter less memory of the device that trains (fp32), 4 (bf16), 2 "
               "(8bit); as many are read and written a step; with host as offload.step says.",
       .only_if = with_states()},
      {.field = number_field(AT(offload.moments.fraction), {0, 1}),
       .example_json = "0.75",
       .doc = "Share of the optimizer states on that tier, as for masters. States of whole tensors (adafactor, "
              "own_matrix) lie there by groups of parameters of a unit, all of a group's or none.",
       .cost = "Traffic in proportion. Of states of whole tensors, memory for those of the units that are exchanged "
               "together, three times, or of a GPU's twice and of its host's four times: the plan says how much.",
       .only_if = {"offload.moments.tier host or nvme",
                   {"/offload/moments/tier"},
                   [](const Strategy& s) { return takes_fraction(s.offload.moments); }}},
      {.field = choice_field(AT(offload.step), offloaded_steps()),
       .example_json = R"("cpu")",
       .doc = "Who updates masters and moments on tier host. The bits are the same. What stays in the GPU's memory is "
              "updated there. \"cpu\" needs an element's masters and moments on the same side: both tiers host, with "
              "one fraction, and is not for muon, lamb, lars, adafactor and own_matrix, which go over them, or over "
              "whole matrices, before an element is updated.",
       .cost = "cpu: of this rank's part on the tier, gradients (4 bytes a parameter) go to the host and new "
               "parameters to the GPU; fp32 parameters and the upper halves of split masters go to the host too. So "
               "much more memory of the host is pinned; parameters and gradients on tier host are used where they lie, "
               "and need none. The GPU needs no records on their way, and waits for the CPU, which updates on as many "
               "threads as LibTorch has, 8 at most. gpu: masters and moments go there and back.",
       .only_if = with_state_on_host()},
      {.pointer = "/offload/gradients/tier",
       .field = choice_field(AT(offload.gradients), gradient_tiers()),
       .example_json = R"("nvme")",
       .doc = "Where the sums of a unit's gradients lie from its reduction to its update, a record a unit; the root "
              "unit's stay in memory. With this and with \"in_backward\" of optimizer no gradients of a whole model "
              "are in memory; this one also clips by norm, skips steps that overflow, and takes several microbatches.",
       .cost = "Saves 4 bytes a parameter of this rank's part, but for the root unit and a few units under way; a rank "
               "alone needs buckets for it, which it has none of else. nvme: each microbatch writes all sums, and from "
               "the second one on reads them first; the update reads them. host: the same with copies, to as much "
               "pinned memory; what the host's CPU updates is not copied back. Updates then go through all records in "
               "the same direction, so that what was used last is not found in memory. nvme with offload.step cpu: the "
               "CPU has copies of its own, so that no memory of the host is saved."},
      {.pointer = "/offload/activations/tier",
       .field = choice_field(AT(offload.activations), gradient_tiers()),
       .example_json = R"("nvme")",
       .doc = "Where tensors lie that forward saves for backward, the inputs of checkpoint regions among them. They "
              "are written while forward goes on, and read ahead of backward, the last one first.",
       .cost = "host, nvme: memory of a microbatch's activations is that of the operators under way. Each is written "
               "and read once a microbatch."},
      {.pointer = "/offload/activations/min",
       .field = bytes_field(AT(offload.activations_min_bytes), {1, kManyBytes}),
       .example_json = R"("256KiB")",
       .doc = "Saved tensors of fewer bytes stay where they are.",
       .cost = "Raising it: their memory. Lowering it: more transfers, each with a latency of its own.",
       .only_if = {"offload.activations.tier host or nvme",
                   {"/offload/activations/tier"},
                   [](const Strategy& s) { return s.offload.activations != Tier::kMemory; }}},
      {.field = names_field(AT(offload.paths)),
       .example_json = R"(["/mnt/nvme0", "/mnt/nvme1"])",
       .doc = "Directories on local disks, one a disk; each rank has a file in every one, and spreads its records over "
              "them: evenly, and from 256 MiB a rank on in proportion to the disks' bandwidth, measured at the start. "
              "The files have no name: they are gone when the run ends, however it ends, but with \"durable\". Without "
              "them tier auto is the memory of a GPU's host, and with them files: to keep something in the host's "
              "memory then, say host.",
       .cost = "Disk space as the plan says.",
       .only_if = with_files()},
      {.pointer = "/offload/record",
       .field = bytes_field(AT(offload.record_bytes), {4096, 1 << 30}),
       .example_json = R"("4MiB")",
       .doc = "The most that is read or written with one operation: a run of parameters, the masters and states of "
              "one, or a piece of an activation.",
       .cost = "Memory: 2 x queue_depth + 1 records, of parameters, of states and of activations each; where a GPU "
               "trains, so many of states in its memory, unless its host's CPU updates them, and with nvme up to 4 x "
               "queue_depth + 1 in its host's. Smaller ones cost time: a disk is fast from about 1 MiB on.",
       .only_if = with_records_of_a_size()},
      {.pointer = "/offload/cache",
       .field = bytes_field(AT(offload.cache_bytes), {0, kManyBytes}),
       .example_json = R"("1GiB")",
       .doc = "Memory of a rank for records that stay in memory from one step to the next, those of parameters first. "
              "They lie evenly among the others, so that the disk works while they are used. Steps go through the "
              "records in alternate directions, so that what was last is first.",
       .cost = "The memory.",
       .only_if = with_state_in_files()},
      {.field = optional_integer_field(AT(offload.queue_depth), {1, 32}, "records"),
       .example_json = "4",
       .doc =
           "Records that are read ahead of the update, and as many that are written behind it, of a GPU's state both "
           "between disk and host and between host and GPU; of activations likewise. Memory of writes that have ended "
           "is read into as well. null: 8; but with \"in_backward\" and without \"memory.limit\" as many as the update "
           "of the largest unit moves, from 8 to 16, so that backward hardly waits for them (8 of activations). On "
           "tier host: activations that are brought back ahead of backward, and as many on their way out.",
       .cost = "Memory: two records each, of parameters, of states and of activations. On tier host: one more "
               "activation on its way out, and one on its way back, in the GPU's memory.",
       .only_if = with_a_queue()},
      {.field = boolean_field(AT(offload.verify)),
       .example_json = "true",
       .doc = "Hashes every record that is written and compares when it is read: finds disks and file systems that "
              "return other bytes.",
       .cost = "Reads each record once more in memory, before it is written and after it is read.",
       .only_if = with_files()},
  };
}

}  // namespace tessera
