#pragma once

#include <absl/status/statusor.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "offload/files/block_file.h"
#include "offload/files/fault_plan.h"
#include "offload/io/io_backend.h"

namespace tessera {

/// A read or write of a contiguous range of a file.
struct IoRequest {
  IoKind kind = IoKind::kRead;
  const BlockFile* file = nullptr;
  std::int64_t offset = 0;  ///< offset in the file in bytes; a multiple of 4096
  /// The memory begins at a multiple of 4096. The caller must not use it until the request has ended.
  std::byte* memory = nullptr;
  std::size_t bytes = 0;      ///< size in bytes; a multiple of 4096, more than 0. The range lies inside the file
  std::string_view who = {};  ///< text at the beginning of errors: "rank 0 parameter layers.3.weight"; it must outlive
                              ///< the request
  std::uint64_t tag = 0;      ///< number with which `wait` selects requests; several requests may have the same tag
};

/// The implementation that transfers the bytes of an IoRing.
enum class IoEngine {
  kBest,     ///< io_uring, or threads if io_uring is forbidden
  kUring,    ///< io_uring; it is an error if io_uring is forbidden
  kThreads,  ///< threads that call pread and pwrite
};

/// The options of an IoRing.
struct IoRingOptions {
  IoEngine engine = IoEngine::kBest;
  int in_flight = 64;      ///< largest number of requests in flight, 1 to 64. With more than 64, the kernel would wait
                           ///< for free tags of the device
  int queue_entries = 64;  ///< size of io_uring's submission queue, 1 to 4096; each entry costs 64 bytes
  int threads = 4;         ///< number of threads, 1 to 64, for IoEngine::kThreads; each thread needs memory for a stack
  /// True: several threads may use the ring, but never two at once. False: only the thread that submits first may use
  /// the ring, so io_uring needs fewer locks.
  bool any_thread = false;
  bool register_memory = true;  ///< io_uring only: true: files and memory are registered with the kernel once, not with
                                ///< each transfer
};

/// Counts, since the ring was made, of requests that ended without an error.
struct IoCounters {
  std::int64_t reads = 0, writes = 0;
  std::int64_t bytes_read = 0, bytes_written = 0;
  std::int64_t resumed = 0;  ///< number of transfers after the first transfer of a request: those of remainders, and
                             ///< retries
  double wait_seconds = 0;   ///< time for which the owner waited for the disk
};

/// A queue of asynchronous reads and writes, for one thread.
///
/// 1. The first thread that submits a request is the owner: only it may use the ring from then on. This thread must
///    also destroy the ring; the destructor waits for the requests in flight. (IoRingOptions::any_thread allows other
///    threads.)
/// 2. A request ends when all its bytes were transferred, or with an error. After a partial transfer the rest is
///    transferred. A transfer that was interrupted, or for which the kernel had no resources, is repeated, at most 100
///    times without progress.
/// 3. Even if the page cache is bypassed, a remainder that does not begin at a multiple of 4096 is transferred through
///    the page cache.
/// 4. Every result is checked. An error is reported once, by `wait` for its tag or by `drain`.
/// 5. Requests end in any order. Two requests that overlap in a file or in memory must not be in flight at the same
///    time, unless both are reads.
///
/// Errors: `file_error` with `who`, the file, the offset, and the numbers of bytes that were wanted and transferred; 70
/// if a request is not made of whole blocks inside the file, or if a second thread uses the ring.
class IoRing {
 public:
  static constexpr int kMostInFlight = 64;

  /// Errors: 69 if `kUring` is not available, 71 if threads cannot be started, 70 if a number is out of range.
  static absl::StatusOr<std::unique_ptr<IoRing>> make(const IoRingOptions& options);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  /// Registers files and memory that requests will use, so that each request costs less. If the limit of locked memory
  /// is too low, the ring works without registration, and `describe` says so. REQUIRES: it is called once, before the
  /// first request; files and memory outlive the ring.
  void register_resources(std::span<const BlockFile* const> files, std::span<const std::span<std::byte>> memory);

  /// Queues a request. It waits only if `in_flight` requests have not ended. The request is submitted to the kernel at
  /// the next `start`, `poll`, `wait` or `drain`, so that one call of the kernel submits several requests.
  absl::Status submit(const IoRequest& request);
  /// Submits queued requests without waiting.
  absl::Status start();
  /// Processes the transfers that have ended, without waiting.
  absl::Status poll();
  /// Waits until all requests with this tag have ended. Returns at once if no request has the tag.
  absl::Status wait(std::uint64_t tag);
  /// Waits for all requests. If there were several errors, it returns the first of them, and the others are not
  /// reported.
  absl::Status drain();

  /// Returns whether a request with this tag was still in flight at the last call that processed results.
  bool busy(std::uint64_t tag) const;
  const IoCounters& counters() const { return counters_; }
  /// Returns a text for logs that names the implementation which transfers the bytes, and the reason for this choice.
  std::string describe() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A request that has not ended.
  struct Operation {
    IoRequest request = {};
    bool active = false;
    bool buffered = false;  ///< true: the file system refused O_DIRECT for this request
    std::size_t done = 0;
    int fruitless = 0;  ///< number of transfers in a row that moved no bytes
    // The following fields describe the transfer under way, or else the next transfer:
    bool prepared = false;  ///< true: the fault of the transfer is known, and the transfer is not queued yet
    bool direct = false;
    Fault fault = {};
    Clock::time_point ready_at{};  ///< the result is not handled before this time (FaultAction::kDelay)
  };

  IoRing(const IoRingOptions& options, std::unique_ptr<IoBackend> backend, std::string why);
  absl::Status check(const IoRequest& request);
  absl::Status check_owner();
  Transfer next_transfer(std::uint32_t slot);
  void prepare(Operation& operation);
  bool begin(std::uint32_t slot);
  absl::Status begin_all();
  absl::Status collect(bool wait);
  void take(const Completion& completion);
  void undo_fault(Operation& operation, std::int32_t& result);
  void go_on(std::uint32_t slot, std::int32_t result);
  void retry(std::uint32_t slot, std::int32_t result);
  void end(std::uint32_t slot, absl::Status status);
  absl::Status error_of(const Operation& operation, int error) const;
  absl::Status broken(absl::Status status);

  const IoRingOptions options_;
  const std::unique_ptr<IoBackend> backend_;
  const std::string why_;  ///< the reason why io_uring is not used; empty if it is used
  std::string unregistered_;
  std::thread::id owner_;
  std::array<Operation, kMostInFlight> operations_;
  int active_ = 0;
  int handed_ = 0;                       ///< number of transfers that were given to the backend and have not completed
  std::vector<std::uint32_t> to_begin_;  ///< indices of operations whose next transfer is not queued yet, oldest first
  std::vector<Completion> injected_;     ///< results of transfers that were replaced by faults (FaultPlan)
  std::vector<std::pair<std::uint64_t, absl::Status>> failures_;
  absl::Status broken_;  ///< error of the backend, after which no transfer is possible
  IoCounters counters_;
};

}  // namespace tessera
