#pragma once

namespace tessera::app {

/// Gives LibTorch as many threads as one rank computes with, and returns the number: $OMP_NUM_THREADS, else this
/// machine's cores divided among its ranks.
int set_threads_of_rank(int local_ranks);

}  // namespace tessera::app
