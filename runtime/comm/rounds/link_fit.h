#pragma once

#include <cstddef>
#include <string>

#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/call_work.h"

namespace tessera {

/// What a network was measured to cost, for the choice of an algorithm: R. Hockney's alpha + beta bytes for each round of messages, with
/// what each message of a round costs, and gamma for the additions. All in seconds, none below 0.
struct LinkFit {
  double round_s = 0;    ///< until messages that are sent have arrived, however short
  double message_s = 0;  ///< of each message of a round
  double byte_s = 0;     ///< of each byte that a rank sends
  double add_s = 0;      ///< of each addition of two elements
  friend bool operator==(const LinkFit&, const LinkFit&) = default;

  double seconds_of(const CallWork& work) const {
    return round_s * work.rounds + message_s * work.messages + byte_s * work.bytes + add_s * work.adds;
  }
};

/// "a round costs 40.0 us, a message 5.0 us, a GB 0.800 s, 1e9 additions 0.200 s".
std::string text_of(const LinkFit& fit);

/// The algorithm that takes least time by `fit`, of those that the call has; kDirect where others are not faster. Operation, ranks, dtype
/// and bytes as in ChooseAlgorithm.
Algorithm choose(Operation operation, int ranks, DType dtype, std::size_t bytes, const LinkFit& fit);

/// The same as a function to be given to groups, which remembers what it chose. Thread-safe.
ChooseAlgorithm choose_by(const LinkFit& fit);

}  // namespace tessera
