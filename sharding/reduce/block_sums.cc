#include "sharding/reduce/block_sums.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <bit>

#include "runtime/border/throw.h"

namespace tessera {

BlockSums::BlockSums(const MemoryPlan& plan, Collectives& world, float* memory, ComputeDevice device)
    : plan_(plan), world_(world), memory_(device), waits_(device.waits) {
  const std::int64_t pieces = world.size() * plan.sums().block_piece_numel, sums = plan.sums().block_sums * pieces;
  sent_ = memory;
  received_ = sent_ + sums;
  gathered_ = received_ + sums;
  deal(plan.order());
}

void BlockSums::deal(const MicrobatchOrder& order) {
  order_ = order;
  arrivals_.clear();
  for (int rank = 0; rank < order_.ranks; ++rank) {
    std::int64_t place = std::int64_t{rank} * plan_.sums().block_sums;
    for (const TreeBlock block : blocks_of(order_.kept_of(rank), order_.all())) arrivals_.push_back({block, place++});
    for (const MadeAgain& again : order_.made_again) {
      if (again.rank == rank) arrivals_.push_back({{again.microbatch, again.microbatch + 1}, place + again.turn});
    }
  }
  std::ranges::sort(arrivals_, {}, [](const Arrival& each) { return each.block.begin; });
}

void BlockSums::join(const FlatGroup& group, std::span<const float* const> own, GradientVisitor* visitor) {
  if (visitor) visitor->begin(group);
  if (plan_.joins_own_parts()) return join_own_part(group, own, visitor);
  join_shares(group, own);
  if (visitor) visitor->visit(group, {group.gradient, static_cast<std::size_t>(group.gradient_part.numel)});
}

void BlockSums::join_own_part(const FlatGroup& group, std::span<const float* const> own, GradientVisitor* visitor) {
  const std::int64_t part = group.gradient_part.numel;
  for (std::int64_t begin = 0; begin < part; begin += plan_.sums().block_piece_numel) {
    const std::int64_t numel = std::min(plan_.sums().block_piece_numel, part - begin);
    exchange(group.unit->name, own, {begin, part, numel, group.layout.numel()});
    memory_.copy(joined(numel), numel, group.gradient + begin);
    if (visitor) visitor->visit(group, {group.gradient + begin, static_cast<std::size_t>(numel)});
  }
}

/// If one of this rank's sums lies in `group.gradient`, each piece of that sum is sent before the result overwrites the
/// piece.
void BlockSums::join_shares(const FlatGroup& group, std::span<const float* const> own) {
  const std::int64_t all = group.layout.numel(), at_once = world_.size() * plan_.sums().block_piece_numel;
  for (std::int64_t begin = 0; begin < all; begin += at_once) {
    const Extent span{begin, std::min(at_once, all - begin)};
    const std::int64_t numel = (span.numel + world_.size() - 1) / world_.size();
    const auto bytes = static_cast<std::size_t>(numel) * sizeof(float);
    exchange(group.unit->name, own, {begin, numel, numel, span.end()});
    float* const share = gathered_ + world_.rank() * numel;
    memory_.copy(joined(numel), numel, share);
    {
      const Timed timed(waits_);
      throw_if_error(world_.all_gather(group.unit->name, share, gathered_, bytes).wait());
    }
    sent_bytes_ += (world_.size() - 1) * static_cast<std::int64_t>(bytes);
    const Extent kept = intersect(span, group.gradient_part);
    if (kept.numel == 0) continue;
    memory_.copy(gathered_ + (kept.offset - begin), kept.numel,
                 group.gradient + (kept.offset - group.gradient_part.offset));
  }
}

void BlockSums::exchange(std::string_view label, std::span<const float* const> own, const Pieces& pieces) {
  const auto sums = static_cast<std::size_t>(plan_.sums().block_sums);
  float* to = sent_;
  for (int rank = 0; rank < world_.size(); ++rank) {
    const std::int64_t begin = pieces.begin + rank * pieces.stride;
    const std::int64_t there = std::clamp(pieces.end - begin, std::int64_t{0}, pieces.numel);
    for (std::size_t i = 0; i < sums; ++i, to += pieces.numel) {
      const std::int64_t count = i < own.size() ? there : 0;  // this rank may have fewer sums than others
      if (count > 0) memory_.copy(own[i] + begin, count, to);
      memory_.clear(to + count, pieces.numel - count);
    }
  }
  const std::size_t bytes = sums * static_cast<std::size_t>(pieces.numel) * sizeof(float);
  {
    const Timed timed(waits_);
    throw_if_error(world_.all_to_all(label, sent_, received_, bytes).wait());
  }
  sent_bytes_ += (world_.size() - 1) * static_cast<std::int64_t>(bytes);
}

const float* BlockSums::joined(std::int64_t numel) {
  std::size_t next = 0;
  const float* const sum = sum_of({0, order_.all()}, next, numel);
  TORCH_INTERNAL_ASSERT(next == arrivals_.size(), "a sum is left over");
  return sum;
}

/// The sum of two nodes is written over its left operand.
float* BlockSums::sum_of(TreeBlock node, std::size_t& next, std::int64_t numel) {
  TORCH_INTERNAL_ASSERT(next < arrivals_.size() && node.numel() > 0, "a sum is missing");
  const Arrival& arrival = arrivals_[next];
  if (arrival.block == node) {
    ++next;
    return received_ + arrival.place * numel;
  }
  const auto rest = static_cast<std::uint64_t>(node.numel() - 1);
  const std::int64_t middle = node.begin + static_cast<std::int64_t>(std::bit_floor(rest));
  float* const left = sum_of({node.begin, middle}, next, numel);
  float* const right = sum_of({middle, node.end}, next, numel);
  const std::array<const float*, 1> waiting{left};
  memory_.join(waiting, right, left, numel);
  return left;
}

}  // namespace tessera
