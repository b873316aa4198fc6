#include "optim/grad_norm.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <stdexcept>

namespace tessera {
namespace {

constexpr std::size_t kLanes = 16;
constexpr std::size_t kAhead = 8 * kNormBlock;  // distance of prefetches, in elements; shards are read once, in order

TESSERA_ALWAYS_INLINE double sum_lanes(double* lanes) {
  for (std::size_t width = kLanes / 2; width > 0; width /= 2) {
    for (std::size_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// Returns the sum of squares of one block. A shorter last block counts as padded with zeros; since x + 0.0 == x, the
// tail can be added in the same order.
TESSERA_ALWAYS_INLINE double block_sum(const float* block, std::size_t numel) {
  // This loop is separate from the sums, because the compiler does not vectorise a loop that also prefetches.
  for (std::size_t line = 0; line < numel; line += kLanes) __builtin_prefetch(block + kAhead + line);
  double lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= numel; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      const double x = block[i + lane];
      lanes[lane] += x * x;
    }
  }
  for (std::size_t lane = 0; i + lane < numel; ++lane) {
    const double x = block[i + lane];
    lanes[lane] += x * x;
  }
  return sum_lanes(lanes);
}

double block_sum_portable(const float* block, std::size_t numel) { return block_sum(block, numel); }
TESSERA_TARGET_AVX2 double block_sum_avx2(const float* block, std::size_t numel) { return block_sum(block, numel); }
TESSERA_TARGET_AVX512 double block_sum_avx512(const float* block, std::size_t numel) { return block_sum(block, numel); }

using BlockSum = double (*)(const float*, std::size_t);
BlockSum block_sum_for(InstructionSet set) {
  switch (set) {
    case InstructionSet::kPortable:
      break;
    case InstructionSet::kAvx2:
      return block_sum_avx2;
    case InstructionSet::kAvx512:
      return block_sum_avx512;
  }
  return block_sum_portable;
}

std::size_t nodes_of(const NormRun& run) {
  std::size_t count = 0;
  for_each_norm_node(run, [&](std::uint32_t, std::uint64_t) { ++count; });
  return count;
}

/// Returns the largest number of entries on the stack while a run is added up: two nodes of each level. The stack may
/// be deeper before the end of the run than at its end.
std::size_t deepest_stack(const NormRun& run) { return 2 * static_cast<std::size_t>(std::bit_width(run.blocks())); }

}  // namespace

NormSums::NormSums(std::vector<NormRun> runs, InstructionSet set)
    : runs_(std::move(runs)), block_sum_(block_sum_for(set)) {
  std::size_t room = 0;
  std::uint64_t end = 0;
  for (const NormRun& run : runs_) {
    if (run.begin < end || run.numel == 0) throw std::invalid_argument("NormSums: runs are in order and not empty");
    end = run.begin + run.numel;
    room = std::max(room, count_ + deepest_stack(run));
    count_ += nodes_of(run);
  }
  sums_.resize(std::max(room, count_));
  reset();
}

void NormSums::reset() {
  at_ = 0;
  run_ = 0;
  stack_ = sums_.data();
  depth_ = 0;
  begin_run();
}

/// Carries up nodes at a tensor's end that will not get a sibling.
void NormSums::end_run() {
  const std::size_t nodes = nodes_of(runs_[run_]);
  for (; depth_ > nodes; --depth_) stack_[depth_ - 2] += stack_[depth_ - 1];
  stack_ += nodes;
  depth_ = 0;
  ++run_;
  begin_run();
}

void NormSums::begin_run() {
  if (run_ < runs_.size()) block_ = runs_[run_].first_block;
}

void NormSums::add(std::span<const float> piece) {
  const std::uint64_t end = at_ + piece.size();
  while (run_ < runs_.size()) {
    const NormRun& run = runs_[run_];
    const std::uint64_t next = run.begin + (block_ - run.first_block) * kNormBlock, run_end = run.begin + run.numel;
    if (next >= end) break;
    const std::uint64_t numel = std::min(run_end, end) - next;
    if (numel % kNormBlock != 0 && end < run_end) {
      throw std::invalid_argument(
          fmt::format("NormSums: elements {} to {} of a part end inside a block of tensor {}, which lies from {} to {}",
                      at_, end, run.tensor, run.begin, run_end));
    }
    add_blocks(piece.data() + (next - at_), numel);
    if (end < run_end) break;
    end_run();
  }
  at_ = end;
}

void NormSums::skip_to(std::uint64_t begin) {
  const auto is_begun = [&] { return run_ < runs_.size() && block_ != runs_[run_].first_block; };
  while (run_ < runs_.size() && !is_begun() && runs_[run_].begin + runs_[run_].numel <= begin) {
    const std::size_t nodes = nodes_of(runs_[run_]);
    std::fill_n(stack_, nodes, 0.0);
    stack_ += nodes;
    ++run_;
    begin_run();
  }
  const bool is_inside = run_ < runs_.size() && (is_begun() ? begin != at_ : begin > runs_[run_].begin);
  if (begin < at_ || is_inside) {
    throw std::invalid_argument(
        fmt::format("NormSums: elements {} to {} of a part are left out, and a tensor lies there in part", at_, begin));
  }
  at_ = begin;
}

void NormSums::add_blocks(const float* values, std::uint64_t numel) {
  double* const stack = stack_;
  std::size_t depth = depth_;
  std::uint64_t done = block_ - runs_[run_].first_block;  // number of the run's blocks that are added so far
  std::uint64_t end = block_;
  for (std::uint64_t begin = 0; begin < numel; begin += kNormBlock) {
    double sum = block_sum_(values + begin, std::min(kNormBlock, numel - begin));
    ++end, ++done;
    // Nodes are merged as long as the node that ends here is a right child whose left sibling is in the run.
    for (std::uint64_t blocks = 2; (end & (blocks - 1)) == 0 && blocks <= done; blocks *= 2) sum = stack[--depth] + sum;
    stack[depth++] = sum;
  }
  block_ = end;
  depth_ = depth;
}

std::span<const double> NormSums::sums() const {
  if (run_ < runs_.size()) throw std::logic_error("NormSums: part of the elements have not been added");
  return {sums_.data(), count_};
}

bool NormSums::finite() const {
  // A sum with a square that is not finite is never finite.
  return std::all_of(sums().begin(), sums().end(), [](double sum) { return std::isfinite(sum); });
}

NormTotals::NormTotals(std::span<const std::uint64_t> numels, std::span<const std::vector<NormRun>> parts) {
  struct Node {
    std::uint32_t tensor;
    NormLink link;
  };
  std::vector<Node> nodes;
  std::vector<std::uint64_t> next_block(numels.size(), 0);
  std::vector<std::uint32_t> count(numels.size(), 0);
  for (std::uint32_t part = 0; part < parts.size(); ++part) {
    std::uint32_t slot = 0;
    for (const NormRun& run : parts[part]) {
      if (run.tensor >= numels.size() || run.first_block != next_block[run.tensor]) {
        throw std::invalid_argument(fmt::format("NormTotals: tensor {}: a run begins with block {}, out of order",
                                                run.tensor, run.first_block));
      }
      next_block[run.tensor] += run.blocks();
      if (run.is_last != (next_block[run.tensor] == norm_blocks_of(numels[run.tensor]))) {
        throw std::invalid_argument(fmt::format("NormTotals: tensor {}: a run to block {} of {} is marked wrongly",
                                                run.tensor, next_block[run.tensor],
                                                norm_blocks_of(numels[run.tensor])));
      }
      for_each_norm_node(run, [&](std::uint32_t, std::uint64_t index) {
        // All nodes before this node have been added, so the left sibling of every right child is on the stack.
        const auto merges = static_cast<std::uint32_t>(std::countr_zero(index + 1));
        nodes.push_back({run.tensor, {part, slot++, merges}});
        ++count[run.tensor];
      });
    }
    most_sums_ = std::max<std::size_t>(most_sums_, slot);
  }
  for (std::size_t t = 0; t < numels.size(); ++t) {
    if (next_block[t] != norm_blocks_of(numels[t])) {
      throw std::invalid_argument(
          fmt::format("NormTotals: tensor {} has {} blocks, got {}", t, norm_blocks_of(numels[t]), next_block[t]));
    }
    first_link_.push_back(first_link_.back() + count[t]);
  }
  links_.resize(nodes.size());
  std::vector<std::uint32_t> place(first_link_.begin(), first_link_.end() - 1);
  for (const Node& node : nodes) links_[place[node.tensor]++] = node.link;
}

double NormTotals::add_up(std::span<const double* const> sums, std::span<double> squares) const {
  std::array<double, kMostNormLevels> stack;
  double total = 0.0;
  for (std::size_t t = 0; t < tensors(); ++t) {
    squares[t] = add_up_nodes(links_.data() + first_link_[t], first_link_[t + 1] - first_link_[t], stack.data(),
                              [&](const NormLink& link) { return sums[link.part][link.slot]; });
    total += squares[t];
  }
  return total;
}

}  // namespace tessera
