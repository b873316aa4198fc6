#include "sharding/reduce/microbatch_tree.h"

#include "runtime/comm/mesh_groups.h"

namespace tessera {

void MicrobatchTree::take_memory(const std::vector<Unit*>& units, Arena& scratch) {
  const MemoryPlan& plan = setup_.plan;
  for (const Unit* unit : units) {
    const std::int64_t bytes = plan.sums().waiting_sums * plan.waiting_numel_of(unit->shape()) * 4;
    waiting_.push_back(bytes > 0 ? reinterpret_cast<float*>(scratch.take(bytes)) : nullptr);
  }
  if (plan.sums().block_sums > 0)
    blocks_.emplace(plan, *setup_.axes.world, reinterpret_cast<float*>(scratch.take(plan.block_exchange_numel() * 4)),
                    setup_.device);
}

/// Returns the sum of `group` that waits in `place`. If the sums are over all ranks, the last place is the place of the
/// total, `group.gradient`.
float* MicrobatchTree::waiting_of(const FlatGroup& group, int place) const {
  if (place == setup_.plan.sums().waiting_sums) return group.gradient;
  const bool is_whole = setup_.accumulates();
  const auto numel_of = [&](const FlatGroup& each) {
    return !each.trainable ? 0 : is_whole ? each.layout.numel() : each.gradient_part.numel;
  };
  std::int64_t all = 0, before = 0;
  for (const auto& each : group.unit->groups) {
    if (each->index < group.index) before += numel_of(*each);
    all += numel_of(*each);
  }
  return waiting_[static_cast<std::size_t>(group.unit->index)] + place * all + before;
}

float* MicrobatchTree::leaf_of(const FlatGroup& group) const {
  if (backup_) return waiting_of(group, setup_.plan.first_backup() + *backup_);
  if (!setup_.makes_tree() || !setup_.accumulates() || round_ >= counter().rounds()) return nullptr;
  const SumCounter::Turn turn = counter().turn(round_);
  return turn.is_last || turn.joined > 0 ? nullptr : waiting_of(group, turn.place);
}

float* MicrobatchTree::place_of_sum(const FlatGroup& group) const {
  if (!setup_.makes_tree() || setup_.accumulates()) return group.gradient;
  const SumCounter::Turn turn = counter().turn(round_);
  return turn.is_last ? group.gradient : waiting_of(group, turn.place);
}

MicrobatchTree::Joined MicrobatchTree::joined_by(const FlatGroup& group) const {
  const SumCounter::Turn turn = counter().turn(round_);
  Joined joined;
  for (int i = turn.joined; i-- > 0;) joined.sums[joined.count++] = waiting_of(group, turn.place + i);
  return joined;
}

void MicrobatchTree::join_leaf(const FlatGroup& group, float* leaf) const {
  if (backup_) return;
  const SumCounter::Turn turn = counter().turn(round_);
  float* const to = turn.is_last ? leaf : waiting_of(group, turn.place);
  memory_.join(joined_by(group).span(), leaf, to, group.layout.numel());
}

std::int64_t MicrobatchTree::join_blocks(const FlatGroup& group, const float* last, GradientVisitor* visitor) {
  std::vector<const float*> own;
  for (int place = 0; place < blocks_->own_blocks(); ++place) own.push_back(waiting_of(group, place));
  if (blocks_->has_whole_run()) own.back() = last;
  for (int turn = 0; turn < blocks_->made_again(); ++turn)
    own.push_back(waiting_of(group, setup_.plan.first_backup() + turn));
  const std::int64_t before = blocks_->sent_bytes();
  blocks_->join(group, own, visitor);
  return blocks_->sent_bytes() - before;
}

}  // namespace tessera
