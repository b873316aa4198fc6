#include "engine/memory/expect_reproducible.h"

#include <c10/util/StringUtil.h>

#include <bit>

#include "runtime/comm/collectives.h"
#include "sharding/layout/plan/microbatch_order.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_power_of_two(std::int64_t number) { return std::has_single_bit(static_cast<std::uint64_t>(number)); }

template <class... Text>
[[noreturn]] void refuse(const Text&... text) {
  throw Error(ExitCode::kConfig, c10::str("/reproducible: ", text...));
}

/// Throws if ranks sum each microbatch (each_microbatch) and a sum would not be the sum of a whole subtree of the tree
/// over all microbatches. The microbatches of one round are a whole subtree if the number of ranks is a power of two.
/// If ranks sum only after the last microbatch (last_microbatch), they send the sums of several subtrees (BlockSums),
/// so any number of ranks is allowed.
void expect_subtrees(const Strategy& strategy, std::int64_t ranks) {
  const std::int64_t each = strategy.gradient_accumulation;
  if (each == 1 || is_power_of_two(ranks) || strategy.gradient_sync == GradientSync::kLastMicrobatch) return;
  refuse(
      "with gradient_sync each_microbatch, ranks that meet for each of several microbatches are a power of two, got ",
      each, " microbatches a step on each of ", ranks,
      " ranks. [T0808] hint: take \"gradient_sync\": \"last_microbatch\", which goes with any numbers, or a power of "
      "two of ranks");
}

bool packs_sums(const Strategy& strategy) {
  return strategy.compression.gradients != WireForm::kPlain || strategy.compression.sums != WireForm::kPlain;
}

/// Throws if gradients or sums are to be compressed, since the sums of subtrees are sent uncompressed.
void expect_plain_blocks(const Strategy& strategy) {
  if (!packs_sums(strategy)) return;
  refuse(
      "compression.gradients and sums pack what a reduction sends, and here ranks send the sums of several subtrees "
      "instead, since what a rank or a replica sums is no whole one. [T0898] hint: leave these keys out; or take a "
      "power of two as gradient_accumulation, without \"deal\", and as many ranks in a replica");
}

[[noreturn]] void refuse_nccl() {
  refuse(
      "NCCL makes sums of several ranks in an order of its own. [T1021] hint: take \"comm\": {\"transport\": "
      "\"cuda_host\"}, for GPUs of one host, or train on the CPU (\"host\" or \"gloo\")");
}

/// Throws if a GPU cannot make the sums, or if hashes are to be recorded, which only the CPU can do. On a GPU, ranks
/// can sum only the gradients of a whole step. If they summed each microbatch, the host would have to add the pieces of
/// each sum to earlier sums (SumVisitor). Sums on a GPU are queued, so the host does not see their pieces.
void expect_built_for_gpu(const Strategy& strategy, std::int64_t ranks) {
  if (strategy.gradient_sync != GradientSync::kLastMicrobatch && strategy.gradient_accumulation > 1 && ranks > 1)
    refuse(
        "on a GPU ranks sum whole steps, and gradient_sync each_microbatch sums each of several microbatches. [T1022] "
        "hint: take \"gradient_sync\": \"last_microbatch\", or train on the CPU (comm.transport \"host\" or \"gloo\")");
  if (strategy.comm.transport == TransportChoice::kNccl && ranks > 1) refuse_nccl();
  if (packs_sums(strategy))
    refuse(
        "compression.gradients and sums of a GPU are summed on its host, over another transport. [T1023] hint: leave "
        "these keys out");
  if (strategy.record_hashes.every > 0)
    refuse(
        "record_hashes reads gradients and masters on the CPU, and a GPU trains. [T1024] hint: leave record_hashes "
        "out, or train on the CPU (comm.transport \"host\" or \"gloo\")");
}

}  // namespace

void expect_reproducible(const Strategy& strategy, const PlanScene& scene) {
  if (!strategy.reproducible) return;
  if (scene.is_queued) expect_built_for_gpu(strategy, scene.mesh.world_size());
  expect_subtrees(strategy, scene.mesh.world_size());
  if (cuts_subtrees(microbatch_order(strategy, scene.mesh.world_size()), scene.mesh))
    return expect_plain_blocks(strategy);
  if (scene.mesh.replicate_size > 1 && !is_power_of_two(scene.mesh.shard_size))
    refuse(
        "sums are made inside a replica before they go over replicas, so a replica has a power of two of ranks, got ",
        scene.mesh.shard_size,
        ". [T0810] hint: take \"gradient_sync\": \"last_microbatch\", or give \"mesh\" such a \"shard\"");
}

void expect_pairwise_transport(const Strategy& strategy, const MeshAxes& axes, const Topology& topology) {
  if (!strategy.reproducible) return;
  const MeshPosition mesh{axes.replicate_size, axes.shard_size, axes.replicate_index, axes.shard_index};
  const bool sends_blocks = cuts_subtrees(microbatch_order(strategy, axes.world->size()), mesh);
  for (const auto& group : {axes.reduce, axes.replicate}) {
    if (group->kind() == TransportKind::kOwn)
      refuse("the program brings a backend of its own (", group->transport(),
             "), which makes sums in an order that nobody knows. [T0811] hint: leave it out, for Tessera's transport "
             "host or gloo, or set \"reproducible\" to false");
    if (group->kind() == TransportKind::kNccl && group->size() > 1) refuse_nccl();
    if (group->kind() == TransportKind::kHierarchical && !sends_blocks && !is_power_of_two(topology.local_world_size))
      refuse("sums are made inside hosts before they go across, so a host has a power of two of ranks, got ",
             topology.local_world_size,
             ". [T0812] hint: start such a number on each host, or take \"comm\": {\"transport\": "
             "\"gloo\"}, which adds over all ranks at once");
  }
}

}  // namespace tessera
