#pragma once

namespace tessera::app {

/// Sets the number of LibTorch's threads for one rank, and returns this number. It is $OMP_NUM_THREADS, or else the
/// number of this machine's cores divided by the number of this machine's ranks.
int set_threads_of_rank(int local_ranks);

}  // namespace tessera::app
