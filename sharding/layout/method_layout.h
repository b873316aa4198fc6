#pragma once

#include <cstdint>

#include "sharding/layout/factor_layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// How gradients that go over a network in other forms than they are, or in part, lie in messages and in memory. Integers only; the same
/// on every rank.

/// Which of the methods of CompressionConfig a strategy has, one at most. A hook is none of them: what it needs, the plan does not know.
enum class MethodKind { kNone, kPowerSgd, kTopK, kRandomK, kMajority, kSignFeedback, kOneBit, kLevels };
MethodKind method_kind(const CompressionConfig& compression);

/// Where each sum is made by one rank: of so many elements in whole runs, the last ranks of fewer or of none.
std::int64_t owned_by_each(std::int64_t numel, int ranks);
/// Those of `rank`.
Extent owned_by(int rank, std::int64_t numel, int ranks);

/// Of CompressionConfig::qsgd_levels or terngrad, which has one; else 0.
std::int64_t levels_of(const CompressionConfig& compression);

/// What a rank sends of a group where there are exchanges between owners: words for each owner's contribution, and as many for its sum.
std::int64_t owner_message_words(MethodKind kind, std::int64_t numel, int ranks);

/// Of a group of which something is sent.
MethodMemory method_memory(const CompressionConfig& compression, const GroupShape& group, int ranks);

}  // namespace tessera
