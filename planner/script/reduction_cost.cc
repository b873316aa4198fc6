#include "planner/script/reduction_cost.h"

#include "planner/script/form_cost.h"
#include "runtime/base/seeded_fault.h"
#include "sharding/compress/method_layout.h"
#include "sharding/layout/placement.h"

namespace tessera {
namespace {

constexpr std::int64_t kF32Bytes = 4;

/// Returns the number of elements, of `numel`, that each of `ranks` ranks owns.
std::int64_t part_of(std::int64_t numel, int ranks) { return (numel + ranks - 1) / ranks; }

struct SentAs {
  WireForm form = WireForm::kPlain;
  DType dtype = DType::kF32;
};

/// A rank sends its contributions to all parts except its own; in an all-reduce it also sends the sum of its own part
/// to each other rank.
CallCost reduction_cost(const Links& links, int ranks, std::int64_t numel, bool is_cut, SentAs contribution,
                        SentAs sums) {
  const std::int64_t part = part_of(numel, ranks);
  const std::int64_t others = seeded_fault(SeededFault::kPartSentToItself) ? ranks : ranks - 1;
  std::int64_t bytes = others * bytes_on_wire(contribution.form, contribution.dtype, part);
  double coding_s = static_cast<double>(others) * links.coding.of_reductions *
                    coding_seconds(links.coding, contribution.form, contribution.dtype, part);
  const auto with_sum = [&](CallCost cost) {
    cost.sum_s = links.sum_s_per_byte * links.coding.of_reductions * static_cast<double>(others * part * kF32Bytes);
    return cost;
  };
  if (is_cut) return with_sum(with_coding(links.cost(links.reduce_scatter, ranks, bytes), coding_s));
  const CallCost sent_on = all_gather_in(sums.form, sums.dtype, part, links, ranks);
  bytes += sent_on.sent_bytes;
  coding_s += sent_on.coding_s;
  return with_sum(with_coding(links.cost(links.all_reduce, ranks, bytes), coding_s));
}

/// Returns the cost, over an axis of `ranks` ranks, of a group's sums under "reproducible" if a rank sends several sums
/// (BlockSums). It is the cost of an all-to-all over the world, and of an all-gather unless each rank keeps exactly the
/// blocks that it joins. Data for another host is sent through the rank that has the same position on that host.
/// `gathered`: the number of parts that a rank has when the all-gather over this axis begins. An all-to-all costs as
/// much as a reduce-scatter of the same bytes, but sums inside a host do not reduce its bytes.
CallCost blocks_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links, int ranks, int gathered) {
  const int world = plan.placement().mesh.world_size();
  const std::int64_t part = kF32Bytes * part_of(group.layout.numel(), world);
  OperationFit exchange = links.reduce_scatter;
  for (double* const beta : {&exchange.beta_s_per_byte, &exchange.busy_beta_s_per_byte})
    *beta /= links.coding.of_gathers;
  CallCost cost = links.cost(exchange, ranks, plan.sums().block_sums * (world / ranks) * (ranks - 1) * part);
  if (gathered == 1)  // the exchange of the other axis has ended, so the rank has all sums
    cost.sum_s = links.sum_s_per_byte * static_cast<double>(plan.sums().block_sums * (world - 1) * part);
  return plan.joins_own_parts() ? cost : cost + links.all_gather_cost(ranks, gathered * part);
}

CallCost plain_all_reduce(const Links& links, int ranks, std::int64_t numel) {
  return reduction_cost(links, ranks, numel, /*is_cut=*/false, {}, {});
}

CallCost message_cost(const MethodMessage& message, const Links& links, int ranks) {
  constexpr std::int64_t kWord = 4;
  switch (message.exchange) {
    case Exchange::kAllReduce:
      return plain_all_reduce(links, ranks, message.words);
    case Exchange::kAllGather:
      return links.all_gather_cost(ranks, kWord * message.words);
    case Exchange::kOwners:  // contributions are sent to owners, and sums are sent back, as in an all-reduce
      return links.cost(links.all_reduce, ranks, 2 * (ranks - 1) * kWord * message.words);
  }
  return {};
}

CallCost method_cost(const MethodLayout& method, const Links& links, int ranks) {
  CallCost cost;
  for (const MethodMessage& message : method.messages) cost = cost + message_cost(message, links, ranks);
  return cost;
}

}  // namespace

CallCost shard_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links) {
  const PlannedPlacement& placement = plan.placement();
  const PlannedWire& wire = plan.wire();
  const int ranks = placement.mesh.shard_size;
  if (plan.sums().block_sums > 0) return blocks_cost(plan, group, links, ranks, placement.mesh.replicate_size);
  if (const MethodLayout method = plan.method_layout_of(group); !method.messages.empty())
    return method_cost(method, links, ranks);
  const bool is_compressed = wire.compressed_shard_part > 0;
  const DType dtype = plan.sums().bucket_mode == BucketMode::kInPlace ? DType::kF32 : wire.reduce;
  const SentAs contribution{is_compressed ? wire.compression.gradients : WireForm::kPlain, dtype};
  const SentAs sums{is_compressed ? wire.compression.sums : WireForm::kPlain,
                    placement.is_queued ? dtype : DType::kF32};
  return reduction_cost(links, ranks, group.layout.numel(), placement.gradients.shard, contribution, sums);
}

CallCost replicate_reduction_cost(const MemoryPlan& plan, const GroupShape& group, const Links& links) {
  const PlannedPlacement& placement = plan.placement();
  const PlannedWire& wire = plan.wire();
  const AxisPlacement gradients = placement.gradients;
  if (plan.sums().block_sums > 0) return blocks_cost(plan, group, links, placement.mesh.replicate_size, /*gathered=*/1);
  const bool is_compressed = wire.compressed_replicate_part > 0;
  const std::int64_t numel = owned({gradients.shard, false}, placement.mesh, group.layout.numel()).numel;
  const SentAs contribution{is_compressed ? wire.compression.gradients : WireForm::kPlain, DType::kF32};
  const SentAs sums{is_compressed ? wire.compression.sums : WireForm::kPlain, DType::kF32};
  return reduction_cost(links, placement.mesh.replicate_size, numel, gradients.replicate, contribution, sums);
}

CallCost notes_cost(const MemoryPlan& plan, int ranks, const Links& links) {
  return plain_all_reduce(links, ranks, plan.sums().notes_numel);
}

}  // namespace tessera
