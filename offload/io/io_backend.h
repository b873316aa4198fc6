#pragma once

#include <absl/status/statusor.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

class BlockFile;

/// The pause before a transfer that the system refuses for now is tried again.
inline constexpr std::chrono::milliseconds kRetryPause{1};

/// The direction of a transfer: from the file to memory, or from memory to the file.
enum class IoKind { kRead, kWrite };

/// One transfer of bytes, as by a call of `pread` or `pwrite`.
struct Transfer {
  IoKind kind = IoKind::kRead;
  const BlockFile* file = nullptr;
  int fd = -1;  ///< one of the two descriptors of a BlockFile
  std::int64_t offset = 0;
  std::byte* memory = nullptr;
  std::uint32_t bytes = 0;
  std::uint32_t slot = 0;  ///< a number that the completion of this transfer contains too
};

/// The result of a transfer: the number of bytes transferred, or a negative errno.
struct Completion {
  std::uint32_t slot = 0;
  std::int32_t result = 0;
};

/// Moves the bytes for an IoRing: io_uring (make_uring_backend) or threads (make_thread_backend). It does not handle
/// retries, remainders or messages; the IoRing handles them, in the same way for io_uring and for threads. One thread
/// uses it.
class IoBackend {
 public:
  virtual ~IoBackend() = default;
  /// Returns a text such as "io_uring (single issuer; 1 file and 32.00 MiB registered)".
  virtual std::string describe() const = 0;
  /// Queues a transfer. Returns false if the queue is full; `push` and `collect` remove transfers from the queue.
  virtual bool enqueue(const Transfer& transfer) = 0;
  /// Submits queued transfers without waiting. After an error no more transfers are possible.
  virtual absl::Status push() = 0;
  /// Moves completions that have arrived into `out`, as many as there is space for. If `wait` is true, it first submits
  /// queued transfers as `push` does, and waits for at least one completion. REQUIRES if `wait` is true: at least one
  /// transfer has not completed yet.
  virtual absl::StatusOr<std::size_t> collect(std::span<Completion> out, bool wait) = 0;
  /// Registers files and memory that transfers will use, so that each transfer costs less. Returns a text that names
  /// the files or memory that could not be registered, with the reason; "" if everything was registered. This call is
  /// optional. REQUIRES: it was not called before, and no transfer is in flight.
  virtual std::string register_resources(std::span<const BlockFile* const> files,
                                         std::span<const std::span<std::byte>> memory) = 0;
};

/// Makes a backend over the kernel's io_uring. `queue_entries`: transfers that fit into the submission queue at once, 1
/// to 4096. `one_thread`: the first thread that queues a transfer is the only thread that uses the backend. Error (69)
/// if io_uring cannot be used, with the errno of io_uring_setup(2) and how to allow it.
absl::StatusOr<std::unique_ptr<IoBackend>> make_uring_backend(int queue_entries, bool one_thread);

/// Makes a backend of threads that call pread(2) and pwrite(2), for systems that forbid io_uring. Each thread moves one
/// transfer at a time. Error (71) if a thread cannot be started.
absl::StatusOr<std::unique_ptr<IoBackend>> make_thread_backend(int threads);

}  // namespace tessera
