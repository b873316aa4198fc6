#pragma once

namespace tessera::app {

/// Threads that one rank computes with: $OMP_NUM_THREADS, else this machine's cores shared by its ranks.
int threads_of_rank(int local_ranks);

/// Gives LibTorch that many threads, and returns the number.
int set_threads_of_rank(int local_ranks);

}  // namespace tessera::app
