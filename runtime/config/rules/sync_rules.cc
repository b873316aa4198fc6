#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>

#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_keys.h"

namespace tessera {
namespace {

constexpr char kForms[] = "outer gradients go as they are, packed, or as int8 or int4";

/// Makes a check that a setting is not used together with outer steps.
StrategyRule without(std::string other, std::string what, std::function<bool(const Strategy&)> holds, const char* why) {
  return {{"/sync/type", std::move(other)},
          fmt::format("A sync.type of outer steps goes without {}: {}.", what, why),
          [holds, what, why](const Strategy& s) -> std::string {
            if (!s.sync.makes_outer_steps() || !holds(s)) return "";
            return fmt::format("cannot stand beside {}: {}. [T0565] hint: leave \"sync\" or that out", what, why);
          }};
}

}  // namespace

std::vector<StrategyRule> sync_rules() {
  using namespace optimizer_traits;
  constexpr unsigned kExcluded = kMatrices | kTensors | kOwnElements;
  return {
      {{"/sync/type", "/sync/every"},
       "A sync.type of outer steps needs sync.every above 0.",
       [](const Strategy& s) -> std::string {
         if (!s.sync.makes_outer_steps() || s.sync.every > 0) return "";
         return "needs \"every\" above 0. [T0562] hint: give it the steps from one outer step to the next";
       }},
      {{"/sync/type", "/sync/start_step"},
       "sync.type post_local_sgd needs sync.start_step above 0.",
       [](const Strategy& s) -> std::string {
         if (s.sync.type != SyncType::kPostLocalSgd || s.sync.start_step > 0) return "";
         return "needs \"start_step\" above 0. [T0563] hint: give it the number of steps that come first, in "
                "which ranks sum gradients as with each_step";
       }},
      {{"/sync/fragments", "/sync/delay", "/sync/every"},
       "With sync.type streaming_diloco, sync.every is at least sync.fragments times sync.delay, and sync.fragments.",
       [](const Strategy& s) -> std::string {
         const SyncConfig& sync = s.sync;
         if (sync.type != SyncType::kStreamingDiloco || sync.every == 0) return "";
         const std::int64_t least = sync.fragments * std::max<std::int64_t>(sync.delay, 1);
         if (least <= sync.every) return "";
         return fmt::format(
             "{} fragments with a delay of {} need \"every\" to be {} or more, since one is on its way at a time; it "
             "is {}. [T0564] hint: raise \"every\", or give fewer fragments",
             sync.fragments, sync.delay, least, sync.every);
       }},
      without(
          "/optimizer/type", "optimizer.type " + types_with(kExcluded),
          [](const Strategy& s) { return has(s.optimizer.type, kExcluded); }, "a save could not average their states"),
      without(
          "/optimizer/state_dtype", "optimizer.state_dtype bf16 or 8bit",
          [](const Strategy& s) { return s.optimizer.state_dtype != StateDType::kF32; },
          "a save averages states over replicas, in fp32"),
      without(
          "/optimizer/shard_over", "optimizer.shard_over world",
          [](const Strategy& s) { return s.optimizer.shard_over_world; }, "each replica needs all masters and states"),
      without(
          "/placement/optimizer", "a placement over host",
          [](const Strategy& s) { return s.placement.is_given() && placement_axes(s).optimizer.host; },
          "each replica needs all masters and states"),
      without(
          "/optimizer/in_backward", "optimizer.in_backward", [](const Strategy& s) { return s.optimizer.in_backward; },
          "the two have not been tried together"),
      without(
          "/mixed_precision/param", "param fp16",
          [](const Strategy& s) { return s.mixed_precision.param == DType::kF16; },
          "replicas would have loss scales of their own, and bf16 needs none"),
      without(
          "/on_spike/action", "on_spike", [](const Strategy& s) { return s.on_spike.action != SpikeAction::kNone; },
          "the loss of all ranks is not known in a step"),
      without(
          "/durable/every", "durable", [](const Strategy& s) { return s.durable.every > 0; },
          "commits do not have the outer optimizer's state"),
      without(
          "/checkpoint/async", "checkpoint.async", [](const Strategy& s) { return s.checkpoint.async; },
          "a save averages over replicas before it writes"),
      without(
          "/check/replica_hash_every", "check.replica_hash_every",
          [](const Strategy& s) { return s.check.replica_hash_every > 0; },
          "optimizer states of replicas differ by design"),
      without(
          "/broadcast_buffers", "broadcast_buffers from_rank_zero or mean",
          [](const Strategy& s) { return sends_buffers(s.broadcast_buffers); },
          "that would meet all replicas in every step"),
      without(
          "/compression/error_feedback", "compression.error_feedback",
          [](const Strategy& s) { return s.compression.error_feedback; }, kForms),
      without(
          "/compression/method", "a compression.method", [](const Strategy& s) { return s.compression.has_method(); },
          kForms),
      {{"/sync/type", "/compression/gradients", "/compression/sums", "/compression/axes"},
       "With outer steps, compression.gradients and sums go with sync.type diloco or streaming_diloco, and need "
       "compression.axes replicate.",
       [](const Strategy& s) -> std::string {
         const bool compresses = s.compression.gradients != WireForm::kPlain || s.compression.sums != WireForm::kPlain;
         if (!s.sync.makes_outer_steps() || !compresses) return "";
         if (!s.sync.has_outer_optimizer())
           return "sends weights as they are. [T0566] hint: leave \"gradients\" and \"sums\" of \"compression\" "
                  "out, or take diloco";
         if (s.compression.axes != CompressedAxes::kReplicate)
           return "compresses outer gradients, over the replicate axis. [T0567] hint: give \"compression\" "
                  "\"axes\": \"replicate\"";
         return "";
       }},
      without(
          "/offload/masters/tier", "offload of training state", [](const Strategy& s) { return s.offload.is_used(); },
          "outer steps go through masters in memory")};
}

}  // namespace tessera
