#pragma once

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Wraps `group` so that a thread of its own makes reductions with Waits::kLater, one after the other, while the caller
/// computes. It is meant for transports whose reductions wait for a wire and have several phases: the next phase begins
/// when the last one has ended, and not when a caller waits.
///
/// Every other call first waits until no reduction is under way. `group` therefore sees one call at a time, in the
/// order in which the caller makes them, which is the same on all ranks.
///
/// Dropping a Work without a wait waits for it: the group uses its memory until it is over. A visitor sees the sums
/// while the caller waits, on the caller's thread. The results have the same bits as those of `group`.
std::shared_ptr<Collectives> reducing_in_background(std::shared_ptr<Collectives> group);

/// Returns a group as reducing_in_background does, but its thread makes all-gathers too. It is meant for transports
/// whose gathers do not go on by themselves.
std::shared_ptr<Collectives> working_in_background(std::shared_ptr<Collectives> group);

}  // namespace tessera
