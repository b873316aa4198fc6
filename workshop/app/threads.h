#pragma once

namespace tessera::app {

/// Sets the number of LibTorch's threads for one rank, and returns it: $OMP_NUM_THREADS, else this
/// machine's cores divided among its ranks.
int set_threads_of_rank(int local_ranks);

}  // namespace tessera::app
