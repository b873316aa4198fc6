#pragma once

#include <cstddef>
#include <cstdint>

#include "optim/instruction_set.h"

namespace tessera {

/// The sum of squares of one dyadic run of blocks: blocks [index * 2^level, (index + 1) * 2^level), less those beyond
/// the unit's end. Plain bytes without padding, so that ranks can exchange arrays of them. A default-made node is
/// *absent*: it fills up arrays of a fixed length and adds nothing.
struct NormNode {
  static constexpr std::uint32_t kAbsent = 0xffffffffu;

  std::uint32_t level = kAbsent;
  std::uint32_t reserved = 0;
  std::uint64_t index = 0;
  double sum = 0.0;
};
static_assert(sizeof(NormNode) == 24, "NormNode must have no padding: ranks exchange its bytes");

/// Adds a node to `stack`, which holds `depth` nodes in block order, no two of which are siblings: at most two of each
/// level, like the digits of a counter. Two siblings at its end become their parent. Returns the new depth.
TESSERA_ALWAYS_INLINE std::size_t push_and_merge(NormNode* stack, std::size_t depth, NormNode node) {
  const auto is_left_sibling = [](const NormNode& left, const NormNode& right) {
    return left.level == right.level && left.index % 2 == 0 && left.index + 1 == right.index;
  };
  while (depth > 0 && is_left_sibling(stack[depth - 1], node)) {
    --depth;
    node = NormNode{.level = node.level + 1, .index = node.index / 2, .sum = stack[depth].sum + node.sum};
  }
  stack[depth] = node;
  return depth + 1;
}

/// The sum of a stack that covers a whole unit. It is of subtrees of falling level: the unit's last ones have no
/// sibling and are carried up to it.
TESSERA_ALWAYS_INLINE double total_of(const NormNode* stack, std::size_t depth) {
  double total = 0.0;
  for (std::size_t i = depth; i-- > 0;) total = i + 1 == depth ? stack[i].sum : stack[i].sum + total;
  return total;
}

}  // namespace tessera
