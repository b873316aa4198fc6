#pragma once

#include <string>

#include "runtime/comm/collectives.h"

namespace tessera {

/// Makes sure that all ranks of `group` are about to make the same call. It is collective. `call` says in words what
/// this rank is about to do, with everything that must be equal. `problem`, unless it is empty, says why this rank
/// cannot make the call.
///
/// Throws tessera::Error (64) on every rank if the words of two ranks differ, or if a rank has a problem. The message
/// has each text and its ranks. The group can be used after that. Throws the group's own errors (75) too. Each rank
/// sends 256 bytes; longer words are cut.
void expect_same_call(Collectives& group, const std::string& call, const std::string& problem = "");

}  // namespace tessera
