#pragma once

#include <span>

#include "runtime/comm/rounds/link_fit.h"

namespace tessera {

/// The work of a call, and the time that it took.
struct TimedWork {
  CallWork work;
  double seconds = 0;
};

/// Returns the least-squares fit of the *relative* error, as fit_alpha_beta does, with no number below 0. Terms that
/// would be negative are left out. Terms that the calls cannot distinguish are left out too (with two ranks, a round is
/// one message). Throws `std::invalid_argument` if there are no calls, or if a time is not above 0.
LinkFit fit_links(std::span<const TimedWork> calls);

}  // namespace tessera
