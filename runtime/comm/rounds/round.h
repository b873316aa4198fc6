#pragma once

#include <cstddef>
#include <vector>

namespace tessera {

/// Neighbouring slices of a buffer that are sent to a rank, or received from a rank, as one message.
struct SliceMessage {
  int peer = 0;           ///< rank of the peer in the group
  std::size_t first = 0;  ///< index of the first slice
  std::size_t count = 1;  ///< number of slices
  /// If true, these are elements of the input, in its dtype. If false, these are elements of the buffer of results,
  /// where sums are fp32.
  bool is_contribution = false;
  friend bool operator==(const SliceMessage&, const SliceMessage&) = default;
};

/// The messages that one rank sends and receives before its next round begins. All messages of a round are under way
/// together. The round ends when all its messages have arrived and all have been sent. Messages between two ranks
/// arrive in the order in which they are sent.
///
/// A call is a list of rounds for each rank. The sends of one rank match the receives of the other rank, but these may
/// be in rounds with different numbers.
struct Round {
  std::vector<SliceMessage> sends, receives;
  /// If true, received data is added to this rank's data, with the lower rank's data on the left. If false, received
  /// data replaces this rank's data.
  bool adds = false;
};

/// One rank's part of a call, round after round.
using Rounds = std::vector<Round>;

}  // namespace tessera
