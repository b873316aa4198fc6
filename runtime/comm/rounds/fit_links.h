#pragma once

#include <span>

#include "runtime/comm/rounds/link_fit.h"

namespace tessera {

/// A call's work and how long the call took.
struct TimedWork {
  CallWork work;
  double seconds = 0;
};

/// Returns the least-squares fit of the *relative* error, as fit_alpha_beta does, with no number below 0. Terms that
/// would be negative are left out, and so are terms that the calls do not tell apart (with two ranks a round is a
/// message). Throws `std::invalid_argument` for no calls, or times that are not above 0.
LinkFit fit_links(std::span<const TimedWork> calls);

}  // namespace tessera
