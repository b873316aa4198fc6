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
#include "runtime/comm/collectives.h"
#include "runtime/comm/sum/wire_codec.h"
#include "tessera/dtype.h"

namespace tessera {

/// Memory with one part for each rank: the part of rank q begins `q * stride` bytes behind `first`.
template <class Void>
struct RankParts {
  Void* first;
  std::size_t stride;
};

/// The communication that one call of a c10d backend has under way: one collective, or messages to and from every other
/// rank. One thread begins and waits; any thread may abort.
///
/// Messages keep both directions of a connection busy. Gloo's collectives do not. Gloo sends a buffer only when the
/// receiver has sent a message that it is ready. This message goes over the connection that carries the data. Gloo's
/// collectives begin to send before they are ready to receive, so the receivers' messages wait behind the data, and the
/// two directions take turns. All-to-alls of 16 MiB were measured at 1 Gbit/s: they carry 60 MB/s in each direction as
/// collectives, and 116 MB/s as messages. This class therefore begins every receive before the first send, and lets two
/// calls be under way.
class Transfers {
 public:
  enum class Means { kCollective, kMessages };
  /// Messages have the limit `timeout` from the beginning of the first wait(), for all of them together. Collectives
  /// have their backend's timeout. `in_backend` is held while the backend begins messages. `in_backend` and `buffers`
  /// must outlive this object.
  Transfers(Means means, std::chrono::milliseconds timeout, Mutex& in_backend, PackBuffers& buffers)
      : means_(means), timeout_(timeout), in_backend_(in_backend), buffers_(buffers) {}
  ~Transfers() { abort(); }  // nothing is aborted if everything has been waited for

  /// Gathers `bytes` from this rank's `shard` into `full` of every rank, in rank order. 0 bytes do nothing.
  void gather(c10d::Backend& backend, int tag, const void* shard, void* full, std::size_t bytes) {
    gather_packed(backend, tag, std::nullopt, shard, {full, bytes}, bytes);
  }
  /// Gathers parts of `bytes` bytes. The parts are packed (packing.h) if `numbers` gives a dtype and if they are sent
  /// as messages. If collectives carry the data, the parts must lie `bytes` apart.
  void gather_packed(c10d::Backend& backend, int tag, std::optional<DType> numbers, const void* shard,
                     RankParts<void> full, std::size_t bytes);
  /// Gathers `numel` elements of each rank, encoded with `coding`. If `coding` rounds, `full` of every rank gets the
  /// rounded elements of all ranks.
  void gather_coded(c10d::Backend& backend, int tag, const WireCoding& coding, const void* shard, RankParts<void> full,
                    std::size_t numel);
  /// Exchanges `bytes` bytes with each other rank: sends rank q its part of `input`. The bytes arrive in rank q's
  /// `output`, at the offset `bytes` times this rank's number. It is not defined whether this rank's own place in
  /// `output` is written. If collectives carry the data, the parts must lie `bytes` apart. `numbers` has the same
  /// meaning as for gather_packed.
  void exchange(c10d::Backend& backend, int tag, RankParts<const void> input, void* output, std::size_t bytes,
                std::optional<DType> numbers = std::nullopt);
  /// `send` sends one message to a rank, and `receive` receives one message from a rank; wait() waits for both.
  /// Messages from one rank to another with the same tag are received in the order in which they were sent. 0 bytes do
  /// nothing. REQUIRES: Means::kMessages.
  void send(c10d::Backend& backend, int tag, int to, const void* data, std::size_t bytes);
  void receive(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes);
  /// Copies `bytes` of rank `root` into `data` of all ranks, by the backend's own collective, also with
  /// Means::kMessages. 0 bytes do nothing.
  void broadcast(c10d::Backend& backend, void* data, std::size_t bytes, int root);
  /// Makes the backend's own barrier.
  void barrier(c10d::Backend& backend);

  /// Waits until all messages have arrived and all have been sent; more may be begun afterwards. Throws the exceptions
  /// of the backend, and std::runtime_error after abort().
  void wait();
  /// Ends all messages: no memory is read or written from now on, and waiting threads return. Collectives are not
  /// ended.
  void abort();
  /// Returns whether a thread waits for a collective, which `abort` does not end.
  bool is_in_collective() const { return is_in_collective_; }

 private:
  /// A packed message that this rank receives.
  struct Packed {
    DType dtype;
    std::size_t bytes;  ///< length when unpacked
    void* to;
    PackBuffer buffer;
  };

  /// A gather in a lossy codec.
  struct Rounded {
    WireCoding coding;
    std::size_t numel;  ///< number of elements of each rank
    std::size_t stride;
    int ranks;
    void* to;
    PackBuffer codes;  ///< codes of all ranks
  };

  struct Places {
    const std::byte* input;
    std::size_t stride;  ///< bytes from the beginning of one rank's part to the beginning of the next rank's part
    std::byte* output;
    std::size_t output_stride;  ///< the same in the output
  };

  void send_and_receive(c10d::Backend& backend, int tag, const Places& places, std::size_t bytes,
                        std::optional<DType> numbers);
  void receive_packed(c10d::Backend& backend, int tag, int from, void* data, std::size_t bytes, DType dtype);
  void add_message(c10::intrusive_ptr<c10d::Work> work);

  const Means means_;
  const std::chrono::milliseconds timeout_;
  Mutex& in_backend_;  // never locked while mutex_ is held
  PackBuffers& buffers_;
  std::vector<Packed> packed_;                           // messages to this rank, kept until wait() is over
  std::vector<Rounded> rounded_;                         // rounded gathers, kept until wait() is over
  std::vector<PackBuffer> sent_;                         // messages from this rank, kept until wait() is over
  std::chrono::steady_clock::time_point deadline_ = {};  // the first wait() sets this
  Mutex mutex_;
  absl::InlinedVector<c10::intrusive_ptr<c10d::Work>, 4> messages_ ABSL_GUARDED_BY(mutex_);
  c10::intrusive_ptr<c10d::Work> collective_;  // only the thread that begins and waits uses this
  bool is_aborted_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> is_in_collective_ = false;
};

}  // namespace tessera
