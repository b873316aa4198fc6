#pragma once

#include "runtime/comm/rounds/round.h"

namespace tessera {

/// All-gathers of `ranks` slices. Rank q has slice q in its place at first. REQUIRES: 0 <= rank < ranks.
///
/// Makes a ring of ranks - 1 rounds. A rank first sends its own slice to the next rank. Each later round passes on the
/// slice that the rank received in the round before. A rank therefore sends ranks - 1 messages and as many slices.
Rounds ring_gather(int rank, int ranks);

/// Makes a recursive doubling for any number of ranks. In round k = 0, 1, ..., a rank has the 2^k slices that begin
/// with its own (cyclically). It sends them, or as many as are missing, to the rank 2^k before it. There are L =
/// ceil(log2 ranks) rounds, and each rank sends ranks - 1 slices. Slices that run over the end of the buffer are sent
/// as two messages: all ranks together send ranks * L + (ranks - 1 - L) messages. (J. Bruck et al., "Efficient
/// Algorithms for All-to-All Communications in Multiport Message-Passing Systems", IEEE TPDS 8 (11), 1997:
/// concatenation.)
Rounds doubling_gather(int rank, int ranks);

}  // namespace tessera
