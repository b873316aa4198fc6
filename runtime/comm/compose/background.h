#pragma once

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Wraps `group` so that a thread of its own makes reductions with Waits::kLater, one after the other, while the caller
/// computes. It is meant for transports whose reductions wait for a network and have several phases. The next phase
/// begins as soon as the phase before has ended, and not only when a caller waits.
///
/// Every other call first waits until no reduction is under way. `group` therefore gets one call at a time, in the
/// order in which the caller makes the calls. This order is the same on all ranks.
///
/// Dropping a Work without a wait waits for the call, since the group uses the call's memory until the call is over. A
/// visitor gets the sums while the caller waits, on the caller's thread. The results have the same bits as those of
/// `group`.
std::shared_ptr<Collectives> reducing_in_background(std::shared_ptr<Collectives> group);

/// Returns a group as reducing_in_background does. Its thread makes all-gathers too. It is meant for transports whose
/// gathers do not continue by themselves.
std::shared_ptr<Collectives> working_in_background(std::shared_ptr<Collectives> group);

}  // namespace tessera
