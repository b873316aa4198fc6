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
  std::int64_t offset = 0;  ///< bytes into the file; a multiple of 4096
  /// Begins at a multiple of 4096; the caller leaves it alone until the request has ended.
  std::byte* memory = nullptr;
  std::size_t bytes = 0;      ///< a multiple of 4096, more than 0; the range lies inside the file
  std::string_view who = {};  ///< text in front of errors: "rank 0 parameter layers.3.weight"; outlives the request
  std::uint64_t tag = 0;      ///< number that `wait` asks for; several requests may have the same tag
};

/// The implementation that moves the bytes of an IoRing.
enum class IoEngine {
  kBest,     ///< io_uring, or threads if io_uring is forbidden
  kUring,    ///< io_uring or an error
  kThreads,  ///< pread and pwrite on threads
};

/// The options of an IoRing.
struct IoRingOptions {
  IoEngine engine = IoEngine::kBest;
  int in_flight = 64;      ///< requests at once, 1 to 64. With more, the kernel would wait for free tags of the device
  int queue_entries = 64;  ///< size of io_uring's submission queue, 1 to 4096; costs 64 bytes each
  int threads = 4;         ///< kThreads only: 1 to 64; each takes a stack
  /// The ring may be used from one thread now and from another later, but never from two at once. If it is false, the
  /// ring belongs to the thread that submits first, so io_uring needs fewer locks.
  bool any_thread = false;
  bool register_memory = true;  ///< io_uring: register files and memory with the kernel once, not with each transfer
};

/// Counts since the ring was made, of requests that ended well.
struct IoCounters {
  std::int64_t reads = 0, writes = 0;
  std::int64_t bytes_read = 0, bytes_written = 0;
  std::int64_t resumed = 0;  ///< transfers after the first of a request: remainders and retries
  double wait_seconds = 0;   ///< time for which the owner waited for the disk
};

/// Asynchronous reads and writes of one thread.
///
/// 1. The first thread that submits is the owner, and the only one that may use the ring from then on.
///    It also destroys the ring, and this waits for the requests in flight. (IoRingOptions::any_thread makes an
///    exception.)
/// 2. A request ends when all its bytes were moved, or with an error. Transfers that moved a part are continued; those
///    that were interrupted, or that the kernel had no room for, are repeated, 100 times at most without progress.
/// 3. If the page cache is bypassed, a remainder that does not begin at a multiple of 4096 is nevertheless moved
///    through it.
/// 4. Every result is checked. An error is reported once, by `wait` for its tag or by `drain`.
/// 5. Requests end in any order. Two requests that overlap in a file or in memory must not be in flight at once, unless
///    both read.
///
/// Errors: `file_error` with who, file, offset, bytes wanted and got; 70 for a request that breaks these rules, or for
/// a call from a second thread.
class IoRing {
 public:
  static constexpr int kMostInFlight = 64;

  /// Errors: 69 `kUring` is not available, 71 no threads, 70 a number out of range.
  static absl::StatusOr<std::unique_ptr<IoRing>> make(const IoRingOptions& options);
  ~IoRing();
  IoRing(const IoRing&) = delete;
  IoRing& operator=(const IoRing&) = delete;

  /// Registers files and memory that requests will use, which makes each of them cheaper. If the limit of locked memory
  /// is too low the ring works without this, and says so in `describe`. REQUIRES: the call comes once, before the first
  /// request; files and memory outlive the ring.
  void register_resources(std::span<const BlockFile* const> files, std::span<const std::span<std::byte>> memory);

  /// Queues a request. Waits only where `in_flight` requests have not ended. The kernel gets the request at the next
  /// `start`, `wait` or `drain`, so that one call of the kernel serves several requests.
  absl::Status submit(const IoRequest& request);
  /// Hands queued requests over, without waiting.
  absl::Status start();
  /// Processes the transfers that have ended, without waiting.
  absl::Status poll();
  /// Waits until all requests with this tag have ended. An unknown tag counts as ended.
  absl::Status wait(std::uint64_t tag);
  /// Waits for all requests. Returns the first error, if there were several; the others are forgotten.
  absl::Status drain();

  /// Returns whether a request with this tag has not ended, as of the last call that processed results.
  bool busy(std::uint64_t tag) const;
  const IoCounters& counters() const { return counters_; }
  /// Returns a text for logs: which implementation moves the bytes, and why.
  std::string describe() const;

 private:
  using Clock = std::chrono::steady_clock;

  /// A request that has not ended.
  struct Operation {
    IoRequest request = {};
    bool active = false;
    bool buffered = false;  ///< the file system refused O_DIRECT for this request
    std::size_t done = 0;
    int fruitless = 0;  ///< transfers in a row that moved nothing
    // These fields describe the next transfer, or the one that is under way:
    bool prepared = false;  ///< whether its fault is known and it is not queued yet
    bool direct = false;
    Fault fault = {};
    Clock::time_point ready_at{};  ///< the result is not taken before this time (FaultAction::kDelay)
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
  const std::string why_;  ///< why io_uring is not used; empty if it is
  std::string unregistered_;
  std::thread::id owner_;
  std::array<Operation, kMostInFlight> operations_;
  int active_ = 0;
  int handed_ = 0;                       ///< transfers that the backend has
  std::vector<std::uint32_t> to_begin_;  ///< operations whose next transfer is still to be queued, oldest first
  std::vector<Completion> injected_;     ///< results of transfers that never took place (FaultPlan)
  std::vector<std::pair<std::uint64_t, absl::Status>> failures_;
  absl::Status broken_;  ///< error of the backend, after which nothing can be moved
  IoCounters counters_;
};

}  // namespace tessera
