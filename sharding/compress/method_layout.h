#pragma once

#include <cstdint>
#include <vector>

#include "sharding/layout/factor_layout.h"
#include "tessera/strategy.h"

namespace tessera {

/// The layout, in messages and in memory, of gradients that a method compresses. The method sends them in another form,
/// or sends only a part of them. The layout consists of integers, which are the same on every rank.

/// The memory that a reduction needs for a group: fp32 elements, in whole cache lines.
struct MethodMemory {
  std::int64_t kept = 0;  ///< number of fp32 elements kept from step to step; each group has its own
  std::int64_t work = 0;  ///< fp32 elements needed while a reduction is under way; all groups use the same memory
};

/// The ways in which ranks exchange messages.
enum class Exchange {
  kAllReduce,  ///< `words` fp32 are summed
  kAllGather,  ///< each rank sends the same number of words to each other rank
  /// Each sum is made by one rank. This rank gets the same number of words from each other rank, and sends as many
  /// words back.
  kOwners,
};
struct MethodMessage {
  Exchange exchange = Exchange::kAllReduce;
  std::int64_t words = 0;  ///< number of words; each has 4 bytes
};

/// The layout of a reduction of one group. If `messages` is empty, gradients are sent unchanged.
struct MethodLayout {
  MethodMemory memory = {};
  std::vector<MethodMessage> messages = {};

  /// Returns the number of bytes of the messages that a rank sends in the reduction.
  std::int64_t wire_bytes(int ranks) const;
};

/// Returns a method's layout for a group, over `ranks` ranks. The code that makes the plan calls this function. The
/// layout of a hook of the program has no messages, since the plan does not know the messages of a hook.
MethodLayout method_layout(const CompressionMethod& method, const GroupShape& group, int ranks);

// Declares layout_of for each type of method; it is defined in the file of the method.
#define TESSERA_LAYOUT_OF(Config, ...) MethodLayout layout_of(const Config& method, const GroupShape& group, int ranks);
TESSERA_COMPRESSION_METHODS(TESSERA_LAYOUT_OF)
#undef TESSERA_LAYOUT_OF

/// Returns `numel`, a number of fp32 elements, rounded up to whole cache lines.
std::int64_t in_lines(std::int64_t numel);
/// Returns the layout of a method whose `work` has this rank's message, and the messages of all ranks.
MethodLayout layout_by_gather(std::int64_t kept, std::int64_t words, int ranks);
/// Returns the layout of a method whose `work` has the messages that this rank sends to each owner, and the messages
/// that it gets from each rank.
MethodLayout layout_by_owners(std::int64_t kept, std::int64_t words, int ranks);

/// Each element is summed by one rank. Returns the number of elements for each rank. Ranks have whole runs, so the last
/// ranks may have fewer elements, or none.
std::int64_t owned_by_each(std::int64_t numel, int ranks);
/// Returns the extent of the elements that `rank` sums.
Extent owned_by(int rank, std::int64_t numel, int ranks);

}  // namespace tessera
