// This file prints a memory plan as a table.

#include <algorithm>
#include <array>
#include <cstdio>
#include <functional>

#include "runtime/base/bytes.h"
#include "runtime/base/text.h"
#include "runtime/base/text_table.h"
#include "sharding/layout/plan/memory_plan.h"

namespace tessera {
namespace {

/// A category, and its content for people.
struct CategoryRow {
  MemoryCategory category;
  const char* name;
  const char* what;
};

/// The rows, in the order of the categories.
constexpr std::array<CategoryRow, kMemoryCategories> kRows = {{
    {MemoryCategory::kParameters, "parameters", "this rank's part of the parameters"},
    {MemoryCategory::kSlots, "slots", "units gathered for compute"},
    {MemoryCategory::kGradients, "gradients", "reduced gradients, fp32"},
    {MemoryCategory::kBuckets, "buckets", "gradients on their way to the reduction"},
    {MemoryCategory::kMasters, "masters", "what fp32 masters have beyond the parameters"},
    {MemoryCategory::kOptimizer, "optimizer", "optimizer state"},
    {MemoryCategory::kStaging, "staging", "scratch"},
    {MemoryCategory::kRecords, "records", "records of what lies below memory, used, on their way, or cached"},
    {MemoryCategory::kCheckpoint, "checkpoint", "copy of what an asynchronous save writes, in host memory"},
    {MemoryCategory::kActivations, "activations", "saved tensors on their way to and from their tier"},
    {MemoryCategory::kFeedback, "feedback", "what gradients on the wire lacked, and their factors, fp32"},
    {MemoryCategory::kHostRecords, "host_records",
     "the host's, for its GPU: records, gradients that are compressed, shards of asynchronous ranks and copies"},
}};
static_assert(std::ranges::adjacent_find(kRows, std::ranges::greater_equal(), &CategoryRow::category) == kRows.end());

std::string exact_bytes(std::int64_t bytes) { return format_bytes(bytes) + " (" + std::to_string(bytes) + " bytes)"; }

/// Returns a text for ranks that train common parameters and own the shards themselves. The text gives the bytes that a
/// rank keeps, and the costs of recording or playing an order.
std::string text_of_common_values(const MemoryPlan& plan) {
  const SyncConfig& outer = plan.update().outer;
  if (!outer.is_asynchronous() || outer.has_servers()) return "";
  const std::int64_t bytes = 4 * plan.passes().outer.states;
  const std::string size = exact_bytes(bytes);
  if (outer.is_hogwild()) {
    const bool is_shared = outer.asynchronous.states == StateSharing::kShared;
    return "hogwild: all ranks read and write one copy of the parameters" +
           (is_shared ? ", and one set of states\n"
                      : "; " + size + " are this rank's own states of the parts of other ranks\n");
  }
  const bool is_adaptive = outer.asynchronous.delay_compensation.adaptive;
  std::string text = "asynchronous: " + size + " are this rank's shard, which all ranks update: values" +
                     (is_adaptive ? ", and means of squares" : "") +
                     "; a step uses the values that it has pulled, which are the parameters above, and no older "
                     "version is kept\n";
  std::int64_t shards = 0, whole = 0;
  for_each_trainable(plan.units(), [&](const GroupShape& group) {
    whole += plan.has_whole_shard(group) ? 1 : 0;
    shards += plan.has_whole_shard(group) ? 1 : plan.placement().mesh.world_size();
  });
  if (whole > 0) {
    text += "whole shards: a push updates each of " + std::to_string(whole) +
            " groups at once, whose memory lies over all ranks";
    if (const std::int64_t work = plan.passes().outer.work; work > 0)
      text += ", through " + exact_bytes(4 * work) + " of scratch";
    text += "\n";
  }
  if (!outer.asynchronous.record_order.empty()) {
    text += "record_order: a rank writes " + std::to_string(2 * shards) + " lines a step, of about 100 bytes each\n";
  }
  if (!outer.asynchronous.play_order.empty())
    text += "play_order: a rank keeps 8 bytes for each line of the file, which are not in this plan\n";
  return text;
}

/// Returns a text about sums that wait, a second copy of the parameters, and gradients that come too late.
std::string text_of_sums(const MemoryPlan& plan) {
  std::string text;
  if (const int waiting = plan.sums().waiting_sums; waiting > 0) {
    text += "reproducible: " + counted(waiting, "sum") + " of each unit's " +
            (plan.keeps_gradients() ? "whole gradients wait" : "part of the gradients wait") +
            " for others of the step's tree in scratch, " + exact_bytes(plan.waiting_bytes()) + "\n";
  }
  if (plan.has_secondary()) {
    const std::int64_t bytes = plan.secondary_bytes();
    text += "secondary: " + exact_bytes(bytes) + " of the parameters are this rank's part of a second copy" +
            (plan.placement().secondary.is_rounded() ? " in int8" : "") + ", which " +
            std::to_string(plan.placement().secondary.ranks) + " neighbouring ranks hold together\n";
  }
  if (plan.update().outer.type == SyncType::kBackups) {
    const std::int64_t ranks = plan.placement().mesh.world_size();
    text += "backups: a step sums the gradients of the first " + std::to_string(ranks - plan.update().outer.backups) +
            " of " + std::to_string(ranks) + " ranks, which read them where they lie\n";
  }
  return text;
}

/// Returns a text about parameter servers, or nothing if there are none.
std::string text_of_servers(const MemoryPlan& plan) {
  const MemoryPlan::ServedBytes served = plan.served_bytes();
  if (served.shards == 0) return "";
  std::string text = "servers: the shards of all parameter servers have " + exact_bytes(served.shards) +
                     "; a rank sends them " + format_bytes(served.sent) + " a step, and receives " +
                     format_bytes(served.received);
  // The gradients of a replica of several ranks are sent with their push.
  if (plan.update().outer.asynchronous.replica_ranks == 1)
    text += "; for each rank they have room for " + format_bytes(4 * plan.passes().outer.served) +
            " of gradients that wait for its push";
  return text + "\n";
}

/// Returns a text about microbatches that are not each rank's own equal share.
std::string text_of_microbatches(const MemoryPlan& plan) {
  std::string text;
  if (plan.wire().longest_run > 0) {
    text += "deal: a rank computes at most " + std::to_string(plan.wire().longest_run) + " of a step's " +
            std::to_string(plan.order().all()) + " microbatches, by its speed\n";
  }
  if (plan.wire().backups > 0 && plan.sums().waiting_sums > 0) {
    const std::int64_t others = plan.order().ranks - 1,
                       bytes = plan.wire().backups * plan.waiting_bytes() / plan.sums().waiting_sums;
    text += "backups: the other ranks make up to " + std::to_string(others * plan.wire().backups) +
            " microbatches of a slow rank again, up to " + std::to_string(plan.wire().backups) +
            " each, and the step waits for so many less; their gradients are " + exact_bytes(bytes) +
            " of those that wait\n";
  }
  if (plan.sums().block_sums > 0) {
    text += "reproducible: a rank's microbatches need not be a whole subtree, so each rank sends " +
            counted(plan.sums().block_sums, "sum") + " of each gradient, " + exact_bytes(plan.block_bytes_of_step()) +
            " a step, through " + format_bytes(4 * plan.block_exchange_numel()) + " of scratch\n";
  }
  if (plan.wire().statistics_numel > 0) {
    text += "broadcast_buffers: a rank sends the running statistics of its microbatches in one all-gather a step, " +
            exact_bytes(plan.statistics_message_bytes()) + ", through " + format_bytes(plan.statistics_bytes()) +
            " of " + (plan.placement().is_queued ? "the host's memory" : "scratch") + "\n";
  }
  return text;
}

/// Returns a text about the bytes that a step copies between a GPU and its host.
std::string text_of_copies(const MemoryPlan& plan) {
  std::string text;
  if (plan.records().streamed_bytes > 0) {
    text += "through the GPU: a step copies " + exact_bytes(plan.records().streamed_bytes) + " of " +
            std::to_string(plan.records().states.records + plan.records().tensor_states.records) +
            " records of at most " +
            format_bytes(std::max(plan.records().states.record_bytes, plan.records().tensor_states.record_bytes)) +
            " there, and as much back\n";
    if (plan.records().states.pinned_bytes > 0 && plan.tiers().step == OffloadedStep::kAuto &&
        plan.can_step_on_host()) {
      text +=
          "offload.step auto: what is measured when the Engine is made may give the update to the CPU of the host, "
          "which needs less memory of the GPU and more of the host\n";
    }
  }
  if (plan.passes().steps_on_host) {
    text += "by the CPU of the host: a step copies " + exact_bytes(plan.passes().host_step.to_host) +
            " there, updates " + std::to_string(plan.records().states.records) + " records of at most " +
            format_bytes(plan.records().states.record_bytes) + ", and copies " +
            exact_bytes(plan.passes().host_step.to_gpu) + " back\n";
  }
  if (plan.slots().uploaded_bytes > 0) {
    text += "to the GPU: a step copies " + exact_bytes(plan.slots().uploaded_bytes) +
            " of parameters there for gathers, and updates them where they lie, in " +
            std::to_string(plan.records().parameters.records) + " records of at most " +
            format_bytes(plan.records().parameters.record_bytes) + " on the host\n";
  }
  if (plan.records().gradient_copies.to_host > 0) {
    text += "gradients: a step copies " + exact_bytes(plan.records().gradient_copies.to_host) +
            " of sums to the host, and " + exact_bytes(plan.records().gradient_copies.to_gpu) + " back to the GPU\n";
  }
  return text;
}

/// Returns a text about records on disk, and about activations.
std::string text_of_tiers(const MemoryPlan& plan) {
  std::string text;
  const std::int64_t records = plan.records_on_disk();
  if (records > 0) {
    std::int64_t largest = 0;
    for (const RecordPool* pool : plan.pools_in_files()) largest = std::max(largest, pool->record_bytes);
    text += "on disk: " + exact_bytes(plan.records().disk.bytes) + " in " + std::to_string(records) +
            " records of at most " + format_bytes(largest) + "; a step reads " +
            format_bytes(plan.records().disk.read_in_two_steps / 2) + " and writes " +
            format_bytes(plan.records().disk.written_in_two_steps / 2) + "\n";
  }
  if (plan.tiers().is_durable) {
    text += "durable: " + format_bytes(plan.records().disk.durable_bytes) + " more on disk; a commit writes at most " +
            format_bytes(plan.records().disk.written_in_commit) + " from memory\n";
  }
  if (plan.tiers().activations != Tier::kMemory) {
    const bool on_disk = plan.tiers().activations == Tier::kNvme;
    text += std::string("activations: tensors of at least ") + format_bytes(plan.tiers().activations_min_bytes) +
            " that forward saves go to " + (on_disk ? "the disk" : "pinned memory of the host") +
            "; how many bytes, the log says after the first step\n";
  }
  return text;
}

}  // namespace

std::string name_of(MemoryCategory category) {
  const auto index = static_cast<std::size_t>(category);
  return index < kMemoryCategories ? kRows[index].name : "?";
}

std::string MemoryPlan::to_table() const {
  TextTable table({left_column("category"), right_column("bytes"), right_column("per rank"), right_column("share"),
                   left_column("what")});
  const auto add = [&](const std::string& name, std::int64_t bytes, const std::string& what) {
    const double share =
        use_.total() > 0 ? 100.0 * static_cast<double>(bytes) / static_cast<double>(use_.total()) : 0.0;
    char text[16];
    std::snprintf(text, sizeof text, "%.1f %%", share);
    table.add_row({name, std::to_string(bytes), format_bytes(bytes), text, what});
  };
  for (std::size_t i = 0; i < kMemoryCategories; ++i) add(kRows[i].name, use_.bytes[i], kRows[i].what);
  table.add_rule();
  add("total", use_.total(), "without activations and the module's buffers");
  if (use_.limited() < use_.total()) add("of the GPU", use_.limited(), "the total without host_records");
  return table.to_string() + text_of_sums(*this) + text_of_common_values(*this) + text_of_servers(*this) +
         text_of_microbatches(*this) + text_of_copies(*this) + text_of_tiers(*this);
}

}  // namespace tessera
