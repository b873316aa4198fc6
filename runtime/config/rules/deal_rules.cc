#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "runtime/config/strategy_keys.h"
#include "runtime/config/transport_rows.h"

// This file has the checks of the settings that "deal" by speed needs and of those that it excludes. Placements that
// gather, and steps with one microbatch per rank, are refused when the Engine plans (engine/memory/make_plan.cc).

namespace tessera {
namespace {

bool by_speed(const Strategy& s) { return s.deal.by == DealBy::kSpeed; }

/// Makes a check that a setting is not used together with "deal" by speed. `more` is the end of the remedy.
StrategyRule never_dealt_with(std::string other, std::string what, std::function<bool(const Strategy&)> holds,
                              const char* why, const char* more) {
  return {{"/deal/by", std::move(other)},
          fmt::format("deal.by speed goes without {}: {}.", what, why),
          [holds, what, why, more](const Strategy& s) -> std::string {
            if (!by_speed(s) || !holds(s)) return "";
            return fmt::format("speed cannot stand beside {}: {}. [T0912] hint: leave one of them out{}", what, why,
                               more);
          }};
}

}  // namespace

std::vector<StrategyRule> deal_rules() {
  return {
      {{"/deal/by", "/gradient_sync"},
       "deal.by speed goes with gradient_sync last_microbatch.",
       [](const Strategy& s) -> std::string {
         if (!by_speed(s) || s.gradient_sync == GradientSync::kLastMicrobatch) return "";
         return "speed needs gradient_sync last_microbatch: with each_microbatch all ranks meet after every "
                "microbatch, so they compute equally many. [T0913] hint: set gradient_sync to \"last_microbatch\"";
       }},
      {{"/deal/longest", "/gradient_accumulation"},
       "deal.longest is 0, or at least gradient_accumulation.",
       [](const Strategy& s) -> std::string {
         if (!by_speed(s) || s.deal.longest == 0 || s.deal.longest >= s.gradient_accumulation) return "";
         return fmt::format(
             "is {}, and ranks have {} microbatches each at first (gradient_accumulation). [T0914] hint: take at "
             "least that many, or leave it out",
             s.deal.longest, s.gradient_accumulation);
       }},
      {{"/deal/backups", "/reproducible"},
       "deal.backups goes with reproducible.",
       [](const Strategy& s) -> std::string {
         if (!by_speed(s) || s.deal.backups == 0 || s.reproducible) return "";
         return "needs reproducible: the sum of a step would depend on which rank made a microbatch. [T0948] hint: set "
                "reproducible to true, or leave backups out";
       }},
      {{"/deal/microbatches", "/gradient_accumulation"},
       "deal.microbatches goes without gradient_accumulation.",
       [](const Strategy& s) -> std::string {
         if (!by_speed(s) || s.deal.microbatches == 0 || s.gradient_accumulation == 1) return "";
         return fmt::format(
             "is {}, and gradient_accumulation, {}, says how many microbatches a step has, too. [T0949] hint: leave "
             "one of them out",
             s.deal.microbatches, s.gradient_accumulation);
       }},
      never_dealt_with(
          "/sync/type", "a sync.type other than each_step",
          [](const Strategy& s) { return s.sync.type != SyncType::kEachStep; },
          "replicas that do not meet in each step need not wait for each other", ""),
      never_dealt_with(
          "/noise_scale/every", "noise_scale", [](const Strategy& s) { return s.noise_scale.every > 0; },
          "ranks' own gradients would be of batches of different sizes", ""),
      never_dealt_with(
          "/compression/method", "a compression.method", [](const Strategy& s) { return s.compression.has_method(); },
          "what a rank keeps for the next step was left out of a batch of another size", ""),
      never_dealt_with(
          "/check/as_across_hosts", "check.as_across_hosts", [](const Strategy& s) { return s.check.as_across_hosts; },
          "ranks that compute different numbers of microbatches use units in different orders", ""),
      never_dealt_with(
          "/broadcast_buffers", "broadcast_buffers from_rank_zero or mean",
          [](const Strategy& s) { return sends_buffers(s.broadcast_buffers); },
          "what forward left in buffers depends on how many microbatches a rank had",
          "; \"microbatch_order\" goes with it, under reproducible"),
      never_dealt_with(
          "/comm/transport", "comm.transport " + transports_with(transport_traits::kOnGpu),
          [](const Strategy& s) { return has(s.comm.transport, transport_traits::kOnGpu); },
          "ranks' speeds are measured on the CPU so far", "; it goes with host and gloo")};
}

}  // namespace tessera
