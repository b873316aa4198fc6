#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/strategy_keys.h"

// This file has the checks of the settings that "reproducible" excludes: all those that make a step's numbers depend on
// the number of ranks. Combinations that depend on the mesh and the device are refused when the Engine plans
// (engine/memory/expect_reproducible.h).

namespace tessera {
namespace {

/// Makes a check that a setting is not used together with "reproducible". `more` is the end of the remedy.
StrategyRule without(std::string other, std::string what, std::function<bool(const Strategy&)> holds, const char* why,
                     const char* more) {
  return {{"/reproducible", std::move(other)},
          fmt::format("reproducible goes without {}: {}.", what, why),
          [holds, what, why, more](const Strategy& s) -> std::string {
            if (!s.reproducible || !holds(s)) return "";
            return fmt::format("cannot stand beside {}: {}. [T0815] hint: leave one of them out{}", what, why, more);
          }};
}

}  // namespace

std::vector<StrategyRule> reproducible_rules() {
  return {
      without(
          "/mixed_precision/reduce", "mixed_precision.reduce bf16 or fp16",
          [](const Strategy& s) { return s.mixed_precision.reduce != DType::kF32; },
          "what is rounded before it is sent is a rank's sum, and one rank sends nothing",
          "; parameters may be bf16 or fp16"),
      without(
          "/compression/gradients", "compression.gradients or sums of int8 or int4",
          [](const Strategy& s) { return is_lossy(s.compression.gradients) || is_lossy(s.compression.sums); },
          "what is rounded before it is sent is a rank's sum, and one rank sends nothing",
          "; \"lossless\" goes with it"),
      without(
          "/compression/gathers", "compression.gathers int8 or int4",
          [](const Strategy& s) { return is_lossy(s.compression.gathers); },
          "ranks would compute with rounded parameters, and one rank would not", "; \"lossless\" goes with it"),
      without(
          "/secondary/form", "secondary.form int8",
          [](const Strategy& s) { return s.secondary.form == SecondaryForm::kInt8; },
          "ranks would compute with rounded parameters, and one rank would not", "; \"plain\" goes with it"),
      without(
          "/compression/method", "a compression.method", [](const Strategy& s) { return s.compression.has_method(); },
          "it makes another sum for each number of ranks", ""),
      without(
          "/sync/type", "a sync.type other than each_step",
          [](const Strategy& s) { return s.sync.type != SyncType::kEachStep; },
          "another number of replicas trains another model", ""),
      without(
          "/optimizer/in_backward", "optimizer.in_backward", [](const Strategy& s) { return s.optimizer.in_backward; },
          "it has one microbatch a step on each rank, so another number of ranks has another number of microbatches",
          ""),
      without(
          "/offload/gradients/tier", "offload.gradients below memory",
          [](const Strategy& s) { return s.offload.gradients != Tier::kMemory; },
          "sums that wait for others in the tree would each need records of their own", ""),
      without(
          "/units/ignored", "units.ignored", [](const Strategy& s) { return !s.units.ignored.empty(); },
          "the program sums the gradients of these parameters, in an order that the Engine does not know", ""),
      without(
          "/broadcast_buffers", "broadcast_buffers from_rank_zero or mean",
          [](const Strategy& s) { return sends_buffers(s.broadcast_buffers); },
          "what forward left in buffers depends on which microbatches a rank had",
          "; \"microbatch_order\" goes with it"),
      {{"/broadcast_buffers", "/reproducible"},
       "broadcast_buffers microbatch_order goes with reproducible.",
       [](const Strategy& s) -> std::string {
         if (s.broadcast_buffers != BufferBroadcast::kMicrobatchOrder || s.reproducible) return "";
         return "microbatch_order needs reproducible, which says what does not depend on ranks. [T1159] hint: set "
                "reproducible to true, or take \"mean\"";
       }},
      {{"/record_hashes/file"},
       "record_hashes.file is not empty where record_hashes.every is above 0.",
       [](const Strategy& s) -> std::string {
         if (s.record_hashes.every == 0 || !s.record_hashes.file.empty()) return "";
         return "is empty, and record_hashes.every asks for a file. [T0892] hint: leave it out for \"hashes.jsonl\"";
       }}};
}

}  // namespace tessera
