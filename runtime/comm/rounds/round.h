#pragma once

#include <cstddef>
#include <vector>

namespace tessera {

/// Neighbouring slices of a buffer that go to a rank, or come from one, as one message.
struct SliceMessage {
  int peer = 0;           ///< rank in the group
  std::size_t first = 0;  ///< slice
  std::size_t count = 1;  ///< slices
  bool is_contribution =
      false;  ///< elements of the input, of its dtype; else what the buffer of results holds: sums are fp32
  friend bool operator==(const SliceMessage&, const SliceMessage&) = default;
};

/// What one rank does before it goes on: all messages of a round are under way together, and it ends when all have arrived and all
/// have left. Messages between two ranks arrive in the order in which they are sent.
///
/// A call is a list of rounds for each rank. What one rank sends and the other receives match, though in rounds of different numbers.
struct Round {
  std::vector<SliceMessage> sends, receives;
  /// What arrives is added to what this rank has, that of the lower rank on the left; else it takes its place.
  bool adds = false;
};

using Rounds = std::vector<Round>;

}  // namespace tessera
