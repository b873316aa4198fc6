#pragma once

namespace tessera {

/// Seconds that a thread has spent so far on bringing data.
struct DataSeconds {
  double batches = 0;  ///< in TokenBatches::next
  double uploads = 0;  ///< in Engine::upload, and in Upload::tensors
};

/// Those of this thread. What another thread brings ahead keeps no program waiting, so it is not in them.
inline DataSeconds& data_seconds_of_this_thread() {
  thread_local DataSeconds seconds;
  return seconds;
}

}  // namespace tessera
