#pragma once

#include <span>

#include "runtime/comm/rounds/link_fit.h"

namespace tessera {

struct TimedWork {
  CallWork work;
  double seconds = 0;
};

/// The fit of least squares of the *relative* error, as fit_alpha_beta, with no number below 0: what would be is left out, and so is what
/// the calls do not tell apart (with two ranks a round is a message). Throws `std::invalid_argument` for no calls, or times that are not
/// above 0.
LinkFit fit_links(std::span<const TimedWork> calls);

}  // namespace tessera
