#include "workshop/app/threads.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdlib>
#include <thread>

namespace tessera::app {
namespace {

int threads_of_rank(int local_ranks) {
  if (const char* text = std::getenv("OMP_NUM_THREADS")) {
    const int threads = std::atoi(text);
    if (threads > 0) return threads;
  }
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / std::max(1, local_ranks));
}

}  // namespace

int set_threads_of_rank(int local_ranks) {
  const int threads = threads_of_rank(local_ranks);
  at::set_num_threads(threads);
  return threads;
}

}  // namespace tessera::app
