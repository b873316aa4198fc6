#pragma once

namespace tessera {

/// Seconds that a thread has spent so far on bringing data.
struct DataSeconds {
  double batches = 0;  ///< seconds in TokenBatches::next
  double uploads = 0;  ///< seconds in Engine::upload and in Upload::tensors
};

/// Returns the seconds of this thread. Work that other threads do ahead is not counted, since the program does not wait
/// for it.
inline DataSeconds& data_seconds_of_this_thread() {
  thread_local DataSeconds seconds;
  return seconds;
}

}  // namespace tessera
