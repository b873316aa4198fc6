#pragma once

#include <string>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Makes sure that all ranks of `group` are about to do the same. Collective. `call` is what this rank is about to do, in
/// words, with all that must be equal; `problem`, unless it is empty, is why it cannot.
///
/// Throws tessera::Error (64) on every rank where words differ or one rank has a problem, with each text and its ranks.
/// The group goes on then. Throws the group's own errors (75) too. Traffic: 256 bytes a rank; longer words are cut.
void expect_same_call(Collectives& group, const std::string& call, const std::string& problem = "");

}  // namespace tessera
