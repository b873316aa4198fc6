#include "engine/memory/expect_reproducible.h"

#include <c10/util/StringUtil.h>

#include <bit>
#include <string>

#include "runtime/comm/collectives.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_power_of_two(std::int64_t number) { return std::has_single_bit(static_cast<std::uint64_t>(number)); }

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  throw Error(ExitCode::kConfig, c10::str("/reproducible: ", text...));
}

/// A round of each_microbatch is a whole subtree of `ranks` neighbours, and a rank's run of last_microbatch one of
/// `each`, where that number is a power of two. Otherwise sums of ranks would cut subtrees.
void expect_subtrees(const Strategy& strategy, std::int64_t ranks) {
  const std::int64_t each = strategy.gradient_accumulation;
  if (ranks == 1 || each == 1) return;
  const bool has_runs = strategy.gradient_sync == GradientSync::kLastMicrobatch;
  if (is_power_of_two(has_runs ? each : ranks)) return;
  const std::string step = c10::str(each, " microbatches a step on each of ", ranks, " ranks");
  if (has_runs) {
    refuse(
        "with gradient_sync last_microbatch, ranks that add up several microbatches themselves need a power of two "
        "of them, got ",
        step, ". [T0807] hint: ",
        is_power_of_two(ranks) ? "take \"gradient_sync\": \"each_microbatch\", which goes with any number of them on "
                                 "a power of two of ranks"
                               : "take a gradient_accumulation that is a power of two, or a power of two of ranks "
                                 "with \"gradient_sync\": \"each_microbatch\"");
  }
  refuse(
      "with gradient_sync each_microbatch, ranks that meet for each of several microbatches are a power of two, got ",
      step, ". [T0808] hint: ",
      is_power_of_two(each) ? "take \"gradient_sync\": \"last_microbatch\", which goes with any number of ranks here, "
                              "or a power of two of ranks"
                            : "take a power of two of ranks; or a gradient_accumulation that is a power of two, with "
                              "\"gradient_sync\": \"last_microbatch\"");
}

}  // namespace

void expect_reproducible(const Strategy& strategy, const PlanScene& scene) {
  if (!strategy.reproducible) return;
  if (scene.is_queued)
    refuse(
        "the tree of sums is made on the CPU so far, and a GPU trains. [T0809] hint: train on the CPU, or leave it "
        "out");
  expect_subtrees(strategy, scene.mesh.world_size());
  if (scene.mesh.replicate_size > 1 && !is_power_of_two(scene.mesh.shard_size))
    refuse(
        "sums are made inside a replica before they go over replicas, so a replica has a power of two of ranks, got ",
        scene.mesh.shard_size, ". [T0810] hint: give \"mesh\" such a \"shard\", or a strategy without replicas");
}

void expect_pairwise_transport(const Strategy& strategy, const MeshAxes& axes, const Topology& topology) {
  if (!strategy.reproducible) return;
  for (const auto& group : {axes.reduce, axes.replicate}) {
    if (group->kind() == TransportKind::kOwn)
      refuse("a backend of the program's makes sums in an order that nobody knows (", group->transport(),
             "). [T0811] hint: take the transport host or gloo");
    if (group->kind() == TransportKind::kHierarchical && !is_power_of_two(topology.local_world_size))
      refuse("sums are made inside hosts before they go across, so a host has a power of two of ranks, got ",
             topology.local_world_size,
             ". [T0812] hint: start such a number on each host, or take \"comm\": {\"transport\": "
             "\"gloo\"}, which adds over all ranks at once");
  }
}

void expect_no_running_statistics(const Strategy& strategy, const torch::nn::Module& module) {
  if (!strategy.reproducible) return;
  for (const auto& part : module.named_modules()) {
    if (!part.value()->is_training()) continue;
    for (const auto& buffer : part.value()->named_buffers(/*recurse=*/false)) {
      if (buffer.key() != "running_mean" || !buffer.value().defined()) continue;
      refuse("module ", part.key(),
             " keeps running statistics, which each rank moves by the microbatches that it has, one after the other. "
             "[T0813] hint: make it with track_running_stats(false), or take a LayerNorm or GroupNorm; in C++ "
             "eval() before the Engine is made will do, too");
    }
  }
}

}  // namespace tessera
