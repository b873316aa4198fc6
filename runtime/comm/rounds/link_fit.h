#pragma once

#include <cstddef>
#include <string>

#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/call_work.h"

namespace tessera {

/// The measured costs of a network, for the choice of an algorithm: R. Hockney's alpha + beta * bytes for each round of
/// messages, a cost for each message of a round, and gamma for the additions. All are in seconds, and none is below 0.
struct LinkFit {
  double round_s = 0;    ///< time until a round's messages have arrived, however short they are
  double message_s = 0;  ///< cost of each message of a round
  double byte_s = 0;     ///< cost of each byte that a rank sends
  double add_s = 0;      ///< cost of each addition of two elements
  friend bool operator==(const LinkFit&, const LinkFit&) = default;

  double seconds_of(const CallWork& work) const {
    return round_s * work.rounds + message_s * work.messages + byte_s * work.bytes + add_s * work.adds;
  }
};

/// Returns a text such as "a round costs 40.0 us, a message 5.0 us, a GB 0.800 s, 1e9 additions 0.200 s".
std::string text_of(const LinkFit& fit);

/// Returns the algorithm with which the call takes the least time according to `fit`, or kDirect if no other algorithm
/// is faster. Operation, ranks, dtype and bytes have the meaning that ChooseAlgorithm gives them.
Algorithm choose(Operation operation, int ranks, DType dtype, std::size_t bytes, const LinkFit& fit);

/// Returns `choose` as a function to be given to groups. The function remembers its choices. It is thread-safe.
ChooseAlgorithm choose_by(const LinkFit& fit);

}  // namespace tessera
