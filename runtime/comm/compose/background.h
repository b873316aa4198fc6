#pragma once

#include <memory>

#include "runtime/comm/collectives.h"

namespace tessera {

/// `group`, whose reductions with Waits::kLater are made one after the other by a thread of their own: the caller computes
/// meanwhile. For transports whose reductions wait for a wire and have several phases; so the next phase begins when the last one
/// has ended, and not when somebody waits.
///
/// Every other call first waits until no reduction is under way. So `group` sees one call at a time, in the order in which the
/// caller makes them, which is the same on all ranks.
///
/// A Work that is dropped without a wait waits: its memory is the group's until it is over. A visitor sees the sums while the
/// caller waits, on the caller's thread. Bits are those of `group`.
std::shared_ptr<Collectives> reducing_in_background(std::shared_ptr<Collectives> group);

/// The same, and all-gathers are made by that thread too. For transports whose gathers do not go on by themselves.
std::shared_ptr<Collectives> working_in_background(std::shared_ptr<Collectives> group);

}  // namespace tessera
