#pragma once

#include <cstddef>

#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/round.h"
#include "tessera/dtype.h"

namespace tessera {

/// A reduction is cut into pieces of so many bytes of one rank's input, so that what is on the wire has little memory, and that of the
/// direct way the sum of one is made while the next is on the wire.
constexpr std::size_t kPieceBytes = 2 << 20;

/// What a call over a network asks of the rank that has most of it; each number is the most of any rank. What two ranks do at the same
/// time counts once.
struct CallWork {
  double rounds = 0;    ///< that follow each other
  double messages = 0;  ///< sent, or received where these are more
  double bytes = 0;     ///< likewise
  double adds = 0;      ///< additions of two elements
};

/// Of a call in which each of `ranks` ranks gives `bytes`: its shard of all_gather, its input of a reduction, elements of `dtype`. As if
/// elements divided evenly. REQUIRES: ranks > 1; has_algorithm(operation, algorithm, bytes).
CallWork work_of(Operation operation, Algorithm algorithm, int ranks, DType dtype, std::size_t bytes);

}  // namespace tessera
