#pragma once

#include <absl/container/inlined_vector.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "runtime/base/mutex.h"
#include "runtime/comm/c10d/packing.h"
#include "tessera/dtype.h"

namespace tessera {

/// What a call of a c10d backend has under way: one collective, or messages to and from every other rank. One thread begins
/// and waits; any thread aborts.
///
/// Messages keep both directions of a connection busy, and Gloo's collectives do not: Gloo sends a buffer only when its receiver has
/// said that it is ready, and says so on the connection that carries the data. Its collectives begin to send before they are ready to
/// receive, so what they say waits behind what they send, and the two directions take turns: measured at 1 Gbit/s, all-to-alls of
/// 16 MiB carry 60 MB/s each way and messages 116. So here every receive is begun before the first send, and two calls may be
/// under way.
class Transfers {
 public:
  enum class Means { kCollective, kMessages };
  /// Messages have `timeout` from when the first wait() begins, for all of them together; collectives have their backend's. `in_backend`
  /// is held while the backend begins messages. It and `buffers` outlive this.
  Transfers(Means means, std::chrono::milliseconds timeout, Mutex& in_backend, PackBuffers& buffers)
      : means_(means), timeout_(timeout), in_backend_(in_backend), buffers_(buffers) {}
  ~Transfers() { abort(); }  // where all has been waited for, there is nothing to abort

  /// `bytes` from this rank's `shard` into `full` of every rank, in the order of ranks. 0 bytes: nothing.
  void gather(c10d::Backend& backend, int tag, const void* shard, void* full, std::size_t bytes) {
    gather_packed(backend, tag, std::nullopt, shard, full, bytes, bytes);
  }
  /// The same, one part every `stride` bytes of `full`; packed (packing.h) where bytes are `numbers` and go as messages. Collectives need a
  /// stride of `bytes`.
  void gather_packed(c10d::Backend& backend, int tag, std::optional<DType> numbers, const void* shard, void* full,
                     std::size_t bytes, std::size_t stride);
  /// The same of `numel` elements of `dtype` a rank in `form`, which is lossy: into `full` of every rank come the rounded ones, its own too.
  void gather_rounded(c10d::Backend& backend, int tag, WireForm form, DType dtype, const void* shard, void* full,
                      std::size_t numel, std::size_t stride);
  /// `bytes` for each other rank: those for rank q begin at `input + q * stride` and arrive in its `output` at this rank's number times
  /// `bytes`. What lies in `output` for this rank itself may be written or not. Collectives need a stride of `bytes`.
  /// `numbers` as in gather_packed.
  void exchange(c10d::Backend& backend, int tag, const void* input, std::size_t stride, void* output, std::size_t bytes,
                std::optional<DType> numbers = std::nullopt);
  /// One message to a rank, or from one, for whose call wait() stands too; of equal tags between two ranks, the first that is sent is the
  /// first that is received. 0 bytes: nothing. REQUIRES: messages as means.
  void send(c10d::Backend& backend, int tag, int to, const void* data, std::size_t bytes);
  void receive(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes);
  /// `bytes` of rank `root` into `data` of all, by the backend's own collective, whatever the means. 0 bytes: nothing.
  void broadcast(c10d::Backend& backend, void* data, std::size_t bytes, int root);
  /// The backend's own.
  void barrier(c10d::Backend& backend);

  /// Until all has arrived and all has left; then more may be begun. Throws what the backend does, and std::runtime_error after abort().
  void wait();
  /// Messages: from now on no memory is read or written, and whoever waits returns. Collectives go on.
  void abort();
  /// A thread waits for a collective, which `abort` does not end.
  bool is_in_collective() const { return is_in_collective_; }

 private:
  /// One that is packed, on its way to this rank.
  struct Packed {
    DType dtype;
    std::size_t bytes;  ///< when unpacked
    void* to;
    PackBuffer buffer;
  };

  /// A gather's.
  struct Rounded {
    WireForm form;
    DType dtype;
    std::size_t numel;  ///< of a rank
    std::size_t stride;
    int ranks;
    void* to;
    PackBuffer codes;  ///< of all ranks
  };

  struct Places {
    const std::byte* input;
    std::size_t stride;  ///< of what goes to each rank
    std::byte* output;
    std::size_t output_stride;  ///< of what comes from each rank
  };

  void send_and_receive(c10d::Backend& backend, int tag, const Places& places, std::size_t bytes,
                        std::optional<DType> numbers);
  void receive_packed(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes, DType dtype);
  void add_message(c10::intrusive_ptr<c10d::Work> work);

  const Means means_;
  const std::chrono::milliseconds timeout_;
  Mutex& in_backend_;  // never taken while mutex_ is held
  PackBuffers& buffers_;
  std::vector<Packed> packed_;                           // to this rank, until wait() is over
  std::vector<Rounded> rounded_;                         // likewise
  std::vector<PackBuffer> sent_;                         // from this rank, likewise
  std::chrono::steady_clock::time_point deadline_ = {};  // set by the first wait()
  Mutex mutex_;
  absl::InlinedVector<c10::intrusive_ptr<c10d::Work>, 4> messages_ ABSL_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10d::Work> collective_;  // of the thread that begins and waits
  bool is_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> is_in_collective_ = false;
};

}  // namespace tessera
