#pragma once

#include "runtime/comm/rounds/round.h"
#include "runtime/comm/rounds/strided_slices.h"

namespace tessera {

/// Reductions by recursive halving whose sums have the order of collectives.h rule 3, on any number of ranks. (R.
/// Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH", 2005. The
/// algorithm of that paper begins halving with the largest distance, and binary blocks join in the opposite order. Both
/// differences change the order of the sums.)
///
/// Ranks form *binary blocks*, the largest first: 13 ranks are 8, 4 and 1. Ranks of a block at distance 1 exchange
/// halves of the buffer and add. Ranks at distance 2 then exchange halves of these halves, and so on. The sums are
/// first those of ranks 0+1, 2+3, and so on, then those of four ranks, as in the pairwise tree. The k-th of 2^b ranks
/// then has the block's sums of all slices whose index is k modulo 2^b. The sums of the last block are then added to
/// the sums of the block before it, and so on to the first block. The tree carries up an odd addend in the same way.
/// The first block then has the sums of all ranks.
///
/// A rank's first message has its contribution, in the dtype of the input. All other messages have partial sums, in
/// fp32. If there are n ranks, S slices and B blocks, the addition moves S (n - 1) slices in all, of which S ceil(n/2)
/// are contributions. A block of 2^b ranks sends b 2^b messages. Each later block sends as many messages as the block
/// before it has ranks.

/// Makes a reduce_scatter of `slices` = `ranks` slices, which lie in the order of StridedSlices. Rank q ends with the
/// sum of slice q in its place. The first block sends the other blocks their sums: one message and one slice for each
/// rank outside of it.
Rounds halving_reduce_scatter(int rank, int ranks, const StridedSlices& slices);

/// Returns the number of slices for halving_all_reduce: the largest power of two that is not above `ranks`.
int halving_slices(int ranks);
/// Makes an all_reduce of halving_slices(ranks) slices. The sums are sent back between the same ranks as the
/// contributions, so there are twice as many messages, and S (n - 1) more slices of sums.
Rounds halving_all_reduce(int rank, int ranks);

}  // namespace tessera
