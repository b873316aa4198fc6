#pragma once

#include <cstdint>

#include "sharding/layout/factor_layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// The layout, in messages and in memory, of gradients that are sent over a network compressed or in part. Integers
/// only; the same on every rank.

/// Which compressor (method of CompressionConfig) a strategy has, one at most. A hook counts as none: the plan does not
/// know what it needs.
enum class MethodKind { kNone, kPowerSgd, kTopK, kRandomK, kMajority, kSignFeedback, kOneBit, kLevels };
MethodKind method_kind(const CompressionConfig& compression);

/// Elements that each rank sums where each sum is made by one rank: whole runs, so the last ranks may have fewer or
/// none.
std::int64_t owned_by_each(std::int64_t numel, int ranks);
/// The elements that `rank` sums.
Extent owned_by(int rank, std::int64_t numel, int ranks);

/// The levels of CompressionConfig::qsgd_levels or terngrad, whichever is set; else 0.
std::int64_t levels_of(const CompressionConfig& compression);

/// Words that a rank sends for a group where owners exchange: this many for each owner's contribution, and as many for
/// its sum.
std::int64_t owner_message_words(MethodKind kind, std::int64_t numel, int ranks);

/// What a compressor needs for a group of which something is sent, in fp32 elements.
MethodMemory method_memory(const CompressionConfig& compression, const GroupShape& group, int ranks);

}  // namespace tessera
