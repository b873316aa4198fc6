#include <fmt/format.h>

#include <functional>
#include <string>
#include <utility>

#include "runtime/config/optimizer_rows.h"
#include "runtime/config/placement_rows.h"
#include "runtime/config/strategy_keys.h"
#include "runtime/config/transport_rows.h"

namespace tessera {

// This file has the rules of a strategy whose ranks have common parameters ("sync" asynchronous, backups and hogwild).
// Most of them refuse a setting beside one or all of the three types, with the reason (`refusal`). The functions before
// `asynchronous_rules` make the rules; their list is in the order of docs/strategy.md, which is made from it.

namespace {

constexpr char kNotTriedTogether[] = "the two have not been tried together";
constexpr char kByOwners[] =
    "the ranks of a step update the owners' parts side by side, and these need whole tensors, or a program's code";
constexpr char kNoProgram[] = "a server has none of the program's code";
constexpr char kUnknownInAStep[] = "no step knows of the other ranks'";

/// Returns "asynchronous", "hogwild" or "backups".
std::string word_of(const Strategy& s) {
  if (s.sync.type == SyncType::kBackups) return "backups";
  return s.sync.is_hogwild() ? "hogwild" : "asynchronous";
}

StrategyRule placement_rule() {
  return {
      {"/sync/type", "/strategy", "/placement/optimizer"},
      "sync.type asynchronous, backups and hogwild need strategy SHARD_OPTIMIZER.",
      [](const Strategy& s) -> std::string {
        if (!s.sync.has_common_parameters() || is_placed_as(s, ShardingStrategy::kShardOptimizer)) return "";
        return word_of(s) +
               " needs \"strategy\" \"SHARD_OPTIMIZER\", or \"placement\" {\"optimizer\": [\"rank\"]}: a rank has all "
               "values and gradients from forward to backward, and masters and states are cut over their owners, "
               "the ranks. [T0827] hint: take one of the two";
      }};
}

StrategyRule refusal(std::string other, std::string text, std::string what, std::function<bool(const Strategy&)> holds,
                     const char* why) {
  return {{"/sync/type", std::move(other)}, std::move(text), [holds, what, why](const Strategy& s) -> std::string {
            if (!holds(s)) return "";
            return fmt::format("{} cannot stand beside {}: {}. [T0828] hint: leave one of them out", word_of(s), what,
                               why);
          }};
}

/// Makes a check that a setting is not used together with any of the ways to train common parameters.
StrategyRule never_with(std::string other, const std::string& what, std::function<bool(const Strategy&)> holds,
                        const char* why) {
  return refusal(
      std::move(other), fmt::format("sync.type asynchronous, backups and hogwild go without {}: {}.", what, why), what,
      [holds = std::move(holds)](const Strategy& s) { return s.sync.has_common_parameters() && holds(s); }, why);
}

/// Makes two checks that a setting is used neither with asynchronous training or Hogwild, nor with backups. `why` is
/// the reason for asynchronous training and for Hogwild. The reason for backups is that nobody has tried the
/// combination.
void add_untried(std::vector<StrategyRule>& rules, const std::string& other, const std::string& what,
                 const std::function<bool(const Strategy&)>& holds, const char* why) {
  rules.push_back(refusal(
      other, fmt::format("sync.type asynchronous and hogwild go without {}: {}.", what, why), what,
      [holds](const Strategy& s) { return s.sync.is_asynchronous() && holds(s); }, why));
  rules.push_back(refusal(
      other, fmt::format("sync.type backups goes without {}: {}.", what, kNotTriedTogether), what,
      [holds](const Strategy& s) { return s.sync.type == SyncType::kBackups && holds(s); }, kNotTriedTogether));
}

/// Makes a check that a setting is not used together with Hogwild.
StrategyRule never_wild_with(std::string other, const std::string& what, std::function<bool(const Strategy&)> holds,
                             const char* why) {
  return refusal(
      std::move(other), fmt::format("sync.type hogwild goes without {}: {}.", what, why), what,
      [holds = std::move(holds)](const Strategy& s) { return s.sync.is_hogwild() && holds(s); }, why);
}

/// Makes a check that a setting is not used together with workers that come and go.
StrategyRule never_elastic_with(std::string other, const std::string& what, std::function<bool(const Strategy&)> holds,
                                const char* why) {
  return {{"/sync/elastic", std::move(other)},
          fmt::format("sync.elastic goes without {}: {}.", what, why),
          [holds = std::move(holds), what, why](const Strategy& s) -> std::string {
            if (!s.sync.is_elastic() || !holds(s)) return "";
            return fmt::format("cannot stand beside {}: {}. [T1029] hint: leave one of them out", what, why);
          }};
}

/// If both keys name one file, writing record_order would empty it, perhaps before all ranks have read it as
/// play_order.
StrategyRule orders_rule() {
  return {{"/sync/record_order", "/sync/play_order"},
          "sync.record_order and sync.play_order are different files.",
          [](const Strategy& s) -> std::string {
            const AsynchronousConfig& orders = s.sync.asynchronous;
            if (orders.record_order.empty() || orders.record_order != orders.play_order) return "";
            return "is the file of play_order too, and would be emptied before it is read. [T0894] hint: name another "
                   "file in one of the two keys";
          }};
}

StrategyRule order_of_replicas_rule() {
  return {
      {"/sync/replica_ranks", "/sync/record_order"},
      "sync.replica_ranks above 1 goes without sync.record_order and sync.play_order.",
      [](const Strategy& s) -> std::string {
        const AsynchronousConfig& config = s.sync.asynchronous;
        if (config.replica_ranks == 1 || (config.record_order.empty() && config.play_order.empty())) return "";
        return "cannot stand beside sync.record_order and sync.play_order: an order is one of replicas of one rank. "
               "[T1058] hint: leave one of them out";
      }};
}

StrategyRule lambda_rule() {
  return {{"/sync/delay_compensation/adaptive", "/sync/delay_compensation/lambda"},
          "sync.delay_compensation.adaptive needs sync.delay_compensation.lambda above 0.",
          [](const Strategy& s) -> std::string {
            const DelayCompensationConfig& delay = s.sync.asynchronous.delay_compensation;
            if (!delay.adaptive || delay.lambda > 0) return "";
            return "needs a \"lambda\" above 0, which it divides. [T0911] hint: give \"lambda\" a number such as 0.04, "
                   "or leave both out";
          }};
}

bool compresses_anything(const CompressionConfig& c) {
  return c.gradients != WireForm::kPlain || c.sums != WireForm::kPlain || c.gathers != WireForm::kPlain ||
         c.has_method() || c.error_feedback;
}

}  // namespace

std::vector<StrategyRule> asynchronous_rules() {
  constexpr unsigned kSharesOrOnGpu = transport_traits::kSharedMemory | transport_traits::kOnGpu;
  using namespace optimizer_traits;
  constexpr unsigned kWhole = kMatrices | kTensors | kLayers;
  std::vector<StrategyRule> rules = {
      placement_rule(),
      never_with(
          "/mesh/replicate", "mesh.replicate above 1", [](const Strategy& s) { return s.mesh.replicas() > 1; },
          "every rank is a replica already, or one of sync.replica_ranks, and masters have one owner"),
      never_wild_with(
          "/comm/transport", "comm.transport " + transports_with(transport_traits::kOnGpu),
          [](const Strategy& s) { return has(s.comm.transport, transport_traits::kOnGpu); },
          "operators read the parameters where ranks share them, in memory of the CPU"),
      never_with(
          "/comm/transport",
          "comm.transport " + transports_without(kSharesOrOnGpu) + " where sync.owners is not servers",
          [](const Strategy& s) {
            const TransportChoice transport = s.comm.transport;
            return transport != TransportChoice::kAuto && !has(transport, kSharesOrOnGpu) && !s.sync.has_servers();
          },
          "parameters are in memory that the ranks of one host share"),
      never_wild_with(
          "/optimizer/type", "optimizer.type " + types_with(kWhole | kOwnElements),
          [](const Strategy& s) { return has(s.optimizer.type, kWhole | kOwnElements); },
          "elements are merged one by one into values that others write, and these need whole tensors, or a program's "
          "code"),
      refusal(
          "/optimizer/type",
          "sync.type backups goes without optimizer.type " + types_with(kWhole | kOwnElements) + ": " + kByOwners + ".",
          "optimizer.type " + types_with(kWhole | kOwnElements),
          [](const Strategy& s) {
            return s.sync.type == SyncType::kBackups && has(s.optimizer.type, kWhole | kOwnElements);
          },
          kByOwners),
      refusal(
          "/optimizer/type",
          "sync.type asynchronous goes without optimizer.type own or own_matrix where sync.owners is servers: " +
              std::string(kNoProgram) + ".",
          "optimizer.type own or own_matrix where sync.owners is servers",
          [](const Strategy& s) {
            const OptimizerType type = s.optimizer.type;
            return s.sync.has_servers() && (type == OptimizerType::kOwn || type == OptimizerType::kOwnMatrix);
          },
          kNoProgram),
      never_with(
          "/optimizer/state_dtype", "optimizer.state_dtype bf16 or 8bit",
          [](const Strategy& s) { return s.optimizer.state_dtype != StateDType::kF32; }, kNotTriedTogether),
      never_with(
          "/optimizer/shard_over", "optimizer.shard_over world",
          [](const Strategy& s) { return s.optimizer.shard_over_world; }, "shards lie over all ranks already"),
      never_with(
          "/optimizer/in_backward", "optimizer.in_backward", [](const Strategy& s) { return s.optimizer.in_backward; },
          kNotTriedTogether),
      never_with(
          "/mixed_precision/param", "param bf16 or fp16",
          [](const Strategy& s) { return s.mixed_precision.param != DType::kF32; },
          "the parameters that ranks share are fp32, and rounding them on the way has not been tried"),
      never_with(
          "/mixed_precision/reduce", "mixed_precision.reduce bf16 or fp16",
          [](const Strategy& s) { return s.mixed_precision.reduce != DType::kF32; },
          "no gradient is sent but to parameter servers, which take fp32"),
      never_with(
          "/durable/every", "durable", [](const Strategy& s) { return s.durable.every > 0; },
          "a commit needs a step that all ranks make together"),
      never_with(
          "/checkpoint/async", "checkpoint.async", [](const Strategy& s) { return s.checkpoint.async; },
          "ranks would go on while a save reads shards that they share"),
      never_with(
          "/check/replica_hash_every", "check.replica_hash_every",
          [](const Strategy& s) { return s.check.replica_hash_every > 0; },
          "parameters of ranks differ, or change meanwhile, by design"),
      never_with(
          "/broadcast_buffers", "broadcast_buffers from_rank_zero or mean",
          [](const Strategy& s) { return sends_buffers(s.broadcast_buffers); },
          "that would meet all ranks in every step"),
      never_with(
          "/compression/gradients", "compression", [](const Strategy& s) { return compresses_anything(s.compression); },
          "nothing goes over a network but to parameter servers, which take fp32"),
      never_with(
          "/offload/masters/tier", "offload of training state", [](const Strategy& s) { return s.offload.is_used(); },
          "shards lie in memory that all ranks reach, or that servers have"),
      never_elastic_with(
          "/sync/record_order", "sync.record_order and sync.play_order",
          [](const Strategy& s) {
            return !s.sync.asynchronous.record_order.empty() || !s.sync.asynchronous.play_order.empty();
          },
          "an order is one of ranks that stay"),
      never_elastic_with(
          "/sync/replica_ranks", "sync.replica_ranks above 1",
          [](const Strategy& s) { return s.sync.asynchronous.replica_ranks > 1; }, "each worker is a job of one rank"),
      never_elastic_with(
          "/deal/by", "deal.by speed", [](const Strategy& s) { return s.deal.by == DealBy::kSpeed; },
          "each worker makes steps of its own"),
      never_elastic_with(
          "/checkpoint/dir", "checkpoint.dir", [](const Strategy& s) { return !s.checkpoint.dir.empty(); },
          "each worker would save there by itself; a program may call save_checkpoint in one of them"),
      never_wild_with(
          "/host_sharing", "host_sharing false", [](const Strategy& s) { return !s.host_sharing; },
          "ranks train one copy of the parameters"),
      never_wild_with(
          "/check/values", "check.values", [](const Strategy& s) { return s.check.values; },
          "other ranks change parameters at any time"),
      never_wild_with(
          "/check/as_across_hosts", "check.as_across_hosts", [](const Strategy& s) { return s.check.as_across_hosts; },
          "no step compares what ranks have read"),
      never_wild_with(
          "/optimizer/centered", "optimizer.centered where sync.states is shared",
          [](const Strategy& s) { return s.optimizer.centered && s.sync.asynchronous.states == StateSharing::kShared; },
          "steps are divided by the difference of two states, which may be 0 where two ranks have written one each"),
      orders_rule(),
      order_of_replicas_rule(),
      lambda_rule()};
  add_untried(
      rules, "/ema/decay", "ema", [](const Strategy& s) { return s.ema.decay > 0; },
      "an average over steps has no meaning where each rank counts its own");
  add_untried(
      rules, "/lr_schedule/base_batch_size", "lr_schedule.base_batch_size",
      [](const Strategy& s) { return s.lr_schedule.base_batch_size > 0; }, kUnknownInAStep);
  add_untried(
      rules, "/lr_schedule/warmup_samples", "lr_schedule.warmup_samples or warmup_epochs",
      [](const Strategy& s) { return s.lr_schedule.warmup_samples > 0 || s.lr_schedule.warmup_epochs > 0; },
      kUnknownInAStep);
  add_untried(
      rules, "/on_spike/action", "on_spike", [](const Strategy& s) { return s.on_spike.action != SpikeAction::kNone; },
      kUnknownInAStep);
  return rules;
}

}  // namespace tessera
