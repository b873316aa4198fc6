#pragma once

#include <cstdint>
#include <vector>

#include "sharding/layout/factor_layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// How gradients that go over a network in other forms than they are, or in part, lie in messages and in memory.
/// Integers only; the same on every rank. method_layout.cc has a row for each type of CompressionMethod, and the
/// compiler refuses one that is missing.

/// What a reduction needs of a group, in fp32 in whole cache lines.
struct MethodMemory {
  std::int64_t kept = 0;  ///< fp32 kept from step to step; each group has its own
  std::int64_t work = 0;  ///< while the reduction is under way; groups have it by turns
};

/// What ranks exchange.
enum class Exchange {
  kAllReduce,  ///< `words` fp32 are summed
  kAllGather,  ///< each rank sends as many words to each other one
  kOwners,  ///< each sum is made by one rank: as many words go to it from each other one, and as many come back to each
};
struct MethodMessage {
  Exchange exchange = Exchange::kAllReduce;
  std::int64_t words = 0;  ///< each has 4 bytes
};

/// A reduction of one group. Gradients go as they are where `messages` is empty.
struct MethodLayout {
  MethodMemory memory = {};
  std::vector<MethodMessage> messages = {};

  /// What a rank contributes to its messages.
  std::int64_t wire_bytes(int ranks) const;
};
/// That of a program's hook has no messages: what it needs, the plan does not know.
MethodLayout method_layout(const CompressionMethod& method, const GroupShape& group, int ranks);

/// Elements that each rank sums where each sum is made by one rank: whole runs, so the last ranks may have fewer or
/// none.
std::int64_t owned_by_each(std::int64_t numel, int ranks);
/// The elements that `rank` sums.
Extent owned_by(int rank, std::int64_t numel, int ranks);

}  // namespace tessera
