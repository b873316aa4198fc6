#pragma once

#include <cstddef>

#include "runtime/comm/rounds/algorithm.h"
#include "runtime/comm/rounds/round.h"
#include "tessera/dtype.h"

namespace tessera {

/// Bytes of one rank's input in a piece of a reduction. Pieces bound the memory of data on the wire, and in the direct
/// algorithm one piece is summed while the next is on the wire.
constexpr std::size_t kPieceBytes = 2 << 20;

/// The costs of a call over a network for the rank that has most to do. Each number is the largest that any rank has.
/// Work that two ranks do at the same time counts once.
struct CallWork {
  double rounds = 0;    ///< number of rounds, which follow each other
  double messages = 0;  ///< number of messages sent, or of messages received if these are more
  double bytes = 0;     ///< number of bytes sent, or of bytes received if these are more
  double adds = 0;      ///< number of additions of two elements
};

/// Returns the work of a call in which each of `ranks` ranks gives `bytes` of elements of `dtype` (its shard of an
/// all_gather, its input of a reduction). It assumes that the elements can be divided evenly among the ranks. REQUIRES:
/// ranks > 1; has_algorithm(operation, algorithm, bytes).
CallWork work_of(Operation operation, Algorithm algorithm, int ranks, DType dtype, std::size_t bytes);

}  // namespace tessera
