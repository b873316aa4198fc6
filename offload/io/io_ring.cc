#include "offload/io/io_ring.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>

#include "offload/files/file_error.h"
#include "offload/files/sector.h"
#include "offload/files/warn_once.h"
#include "offload/io/io_backend.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "tessera/span.h"

namespace tessera {
namespace {

// This file executes requests as sequences of transfers.
//
// A request occupies one of the `operations_` until it ends. `begin` queues its next transfer (through the page cache
// if O_DIRECT cannot be used), `push` submits it, and `collect` receives its completion. `take` handles the result.
// After a transfer of only a part, the rest is transferred next (`go_on`); a transfer of no bytes is repeated
// (`retry`). Any other result ends the operation (`end`), which keeps an error until `wait` or `drain` returns it.
// `prepare` and `undo_fault` apply a FaultPlan; `injected_` contains the results that the plan replaces.

constexpr int kMostFruitless = 100;
constexpr int kPatientFruitless = 10;  // after this many transfers in a row without bytes, retries come after a pause
// One call of the kernel transfers at most 2^31 bytes minus a page. kMostTransferBytes is the largest power of two
// below this limit, so that all parts of a transfer begin at a multiple of a sector.
constexpr std::size_t kMostTransferBytes = std::size_t{1} << 30;

absl::Status check_range(const char* what, int value, int most) {
  if (value >= 1 && value <= most) return absl::OkStatus();
  return make_error(ExitCode::kInternal, fmt::format("disk I/O: {} is {}, want 1 to {}", what, value, most));
}

const char* verb(IoKind kind) { return kind == IoKind::kRead ? "read" : "write"; }

}  // namespace

absl::StatusOr<std::unique_ptr<IoRing>> IoRing::make(const IoRingOptions& options) {
  TESSERA_RETURN_IF_ERROR(check_range("in_flight", options.in_flight, kMostInFlight));
  TESSERA_RETURN_IF_ERROR(check_range("queue_entries", options.queue_entries, 4096));
  TESSERA_RETURN_IF_ERROR(check_range("threads", options.threads, 64));
  std::string why;
  if (options.engine != IoEngine::kThreads) {
    auto uring = make_uring_backend(options.queue_entries, !options.any_thread);
    if (uring.ok()) return std::unique_ptr<IoRing>(new IoRing(options, *std::move(uring), ""));
    if (options.engine == IoEngine::kUring) return uring.status();
    why = message_of(uring.status());
    warn_once("no io_uring", why + ". Until then disk I/O goes through threads, which costs more CPU time");
  }
  TESSERA_ASSIGN_OR_RETURN(std::unique_ptr<IoBackend> threads, make_thread_backend(options.threads));
  return std::unique_ptr<IoRing>(new IoRing(options, std::move(threads), why));
}

IoRing::IoRing(const IoRingOptions& options, std::unique_ptr<IoBackend> backend, std::string why)
    : options_(options), backend_(std::move(backend)), why_(std::move(why)) {
  to_begin_.reserve(kMostInFlight);
  injected_.reserve(kMostInFlight);
}

IoRing::~IoRing() {
  // The memory of the transfers is freed after the ring, so all transfers must have ended.
  if (const absl::Status status = drain(); !status.ok()) log_error(message_of(status));
}

void IoRing::register_resources(std::span<const BlockFile* const> files, std::span<const std::span<std::byte>> memory) {
  if (!options_.register_memory) return;
  unregistered_ = backend_->register_resources(files, memory);
  if (unregistered_.empty()) return;
  warn_once("not registered",
            fmt::format("io_uring could not register {}. [T0376] hint: raise the limit of locked memory (ulimit "
                        "-l). Until then each transfer costs a little more",
                        unregistered_));
}

std::string IoRing::describe() const {
  std::string text = backend_->describe();
  if (!unregistered_.empty()) text += "; not registered: " + unregistered_;
  if (!why_.empty()) text += "; because " + why_;
  return text;
}

bool IoRing::busy(std::uint64_t tag) const {
  return std::ranges::any_of(
      operations_, [&](const Operation& operation) { return operation.active && operation.request.tag == tag; });
}

absl::Status IoRing::check_owner() {
  if (options_.any_thread) return broken_;
  if (owner_ == std::thread::id()) owner_ = std::this_thread::get_id();
  if (owner_ != std::this_thread::get_id())
    return make_error(ExitCode::kInternal, "an IoRing is used by two threads, want the one that submitted first");
  return broken_;
}

absl::Status IoRing::check(const IoRequest& request) {
  const auto address = reinterpret_cast<std::uintptr_t>(request.memory);
  const char* wrong = nullptr;
  if (request.file == nullptr || request.memory == nullptr || request.bytes == 0) {
    wrong = "has no file, no memory or no bytes";
  } else if (!in_sectors(address) || !in_sectors(request.bytes) || request.offset < 0 ||
             !in_sectors(static_cast<std::uint64_t>(request.offset))) {
    wrong = "is not made of whole blocks of 4096 bytes, in the file and in memory";
  } else if (request.offset > request.file->bytes() ||
             request.bytes > static_cast<std::uint64_t>(request.file->bytes() - request.offset)) {
    wrong = "reaches behind the end of the file";
  }
  if (wrong == nullptr) return absl::OkStatus();
  return make_error(ExitCode::kInternal,
                    fmt::format("{}: {} of {} bytes at offset {}, memory {:#x}: {}", request.who, verb(request.kind),
                                request.bytes, request.offset, address, wrong));
}

absl::Status IoRing::submit(const IoRequest& request) {
  TESSERA_RETURN_IF_ERROR(check_owner());
  TESSERA_RETURN_IF_ERROR(check(request));
  while (active_ >= options_.in_flight) {
    TESSERA_RETURN_IF_ERROR(begin_all());
    TESSERA_RETURN_IF_ERROR(collect(true));
  }
  const auto free = std::ranges::find_if(operations_, [](const Operation& operation) { return !operation.active; });
  *free = Operation{.request = request, .active = true};
  ++active_;
  to_begin_.push_back(static_cast<std::uint32_t>(free - operations_.begin()));
  return begin_all();
}

absl::Status IoRing::start() {
  TESSERA_RETURN_IF_ERROR(check_owner());
  TESSERA_RETURN_IF_ERROR(begin_all());
  if (absl::Status status = backend_->push(); !status.ok()) return broken(std::move(status));
  return absl::OkStatus();
}

absl::Status IoRing::poll() {
  TESSERA_RETURN_IF_ERROR(check_owner());
  if (active_ == 0) return absl::OkStatus();
  TESSERA_RETURN_IF_ERROR(collect(false));
  return start();
}

absl::Status IoRing::wait(std::uint64_t tag) {
  TESSERA_RETURN_IF_ERROR(check_owner());
  while (busy(tag)) {
    TESSERA_RETURN_IF_ERROR(begin_all());
    if (busy(tag)) TESSERA_RETURN_IF_ERROR(collect(true));
  }
  const auto failed = std::ranges::find(failures_, tag, &std::pair<std::uint64_t, absl::Status>::first);
  if (failed == failures_.end()) return absl::OkStatus();
  absl::Status status = failed->second;
  std::erase_if(failures_, [&](const auto& failure) { return failure.first == tag; });
  return status;
}

absl::Status IoRing::drain() {
  if (active_ == 0 && failures_.empty()) return broken_;
  TESSERA_RETURN_IF_ERROR(check_owner());
  while (active_ > 0) {
    TESSERA_RETURN_IF_ERROR(begin_all());
    if (active_ > 0) TESSERA_RETURN_IF_ERROR(collect(true));
  }
  if (failures_.empty()) return absl::OkStatus();
  absl::Status status = failures_.front().second;
  failures_.clear();
  return status;
}

// Returns the transfer for the rest of the operation. It goes through the page cache if necessary.
Transfer IoRing::next_transfer(std::uint32_t slot) {
  Operation& operation = operations_[slot];
  const IoRequest& request = operation.request;
  std::size_t bytes = std::min(request.bytes - operation.done, kMostTransferBytes);
  if (operation.fault.action == FaultAction::kShort)
    bytes = std::min(bytes, static_cast<std::size_t>(operation.fault.number));
  if (operation.fault.action == FaultAction::kTorn)
    bytes = std::min(bytes, static_cast<std::size_t>(operation.fault.number) * kSectorBytes);
  operation.direct = request.file->direct() && !operation.buffered && in_sectors(operation.done) && in_sectors(bytes);
  return {.kind = request.kind,
          .file = request.file,
          .fd = operation.direct ? request.file->fd() : request.file->buffered_fd(),
          .offset = request.offset + static_cast<std::int64_t>(operation.done),
          .memory = request.memory + operation.done,
          .bytes = static_cast<std::uint32_t>(bytes),
          .slot = slot};
}

// Asks the fault plan for the fault of the operation's next transfer.
void IoRing::prepare(Operation& operation) {
  operation.prepared = true;
  const IoRequest& request = operation.request;
  const bool is_write = request.kind == IoKind::kWrite;
  operation.fault = fault_at(is_write ? FaultSite::kWrite : FaultSite::kRead, request.file->name());
  if (operation.fault.action == FaultAction::kDelay)
    operation.ready_at = Clock::now() + std::chrono::milliseconds(operation.fault.number);
  if (operation.fault.action != FaultAction::kBitFlip) return;
  if (static_cast<std::uint64_t>(operation.fault.number) >= request.bytes - operation.done) {
    operation.fault = {};
  } else if (is_write) {  // the bit stays flipped until the transfer has ended (undo_fault)
    request.memory[operation.done + static_cast<std::size_t>(operation.fault.number)] ^= std::byte{1};
  }
}

// Queues the operation's next transfer. Returns false if the queue is full.
bool IoRing::begin(std::uint32_t slot) {
  Operation& operation = operations_[slot];
  const std::string& name = operation.request.file->name();
  if (const Fault full = fault_at(FaultSite::kSubmit, name); full.action == FaultAction::kErrno) {
    if (++operation.fruitless <= kMostFruitless) return false;
    injected_.push_back({slot, static_cast<std::int32_t>(-full.number)});
    return true;
  }
  if (!operation.prepared) prepare(operation);
  const Transfer transfer = next_transfer(slot);
  if (operation.fault.action == FaultAction::kErrno || transfer.bytes == 0) {
    const bool fails = operation.fault.action == FaultAction::kErrno;
    injected_.push_back({slot, fails ? static_cast<std::int32_t>(-operation.fault.number) : 0});
    operation.prepared = false;
    return true;
  }
  if (!backend_->enqueue(transfer)) return false;
  operation.prepared = false;
  ++handed_;
  return true;
}

// Begins all transfers that can begin. If the queue is full, its transfers are submitted; if that does not help,
// completions are handled.
absl::Status IoRing::begin_all() {
  while (!to_begin_.empty()) {
    const std::uint32_t slot = to_begin_.front();
    if (!begin(slot)) {
      if (absl::Status status = backend_->push(); !status.ok()) return broken(std::move(status));
      if (!begin(slot)) {
        TESSERA_RETURN_IF_ERROR(collect(handed_ > 0));
        continue;
      }
    }
    to_begin_.erase(to_begin_.begin());
  }
  return absl::OkStatus();
}

// REQUIRES if `wait` is true: the backend has a transfer, or a result was injected.
absl::Status IoRing::collect(bool wait) {
  std::array<Completion, kMostInFlight> completions;
  std::size_t found = 0;
  if (!injected_.empty()) {
    found = injected_.size();
    std::ranges::copy(injected_, completions.begin());
    injected_.clear();
  } else {
    Span span("disk", "wait", wait ? &counters_.wait_seconds : nullptr);
    auto collected = backend_->collect(completions, wait);
    if (!collected.ok()) return broken(collected.status());
    found = *collected;
    handed_ -= static_cast<int>(found);
  }
  for (std::size_t i = 0; i < found; ++i) take(completions[i]);
  return absl::OkStatus();
}

// Undoes a fault plan's change of memory, and sets the result that the plan's fault requires.
void IoRing::undo_fault(Operation& operation, std::int32_t& result) {
  const Fault& fault = operation.fault;
  std::byte* const memory = operation.request.memory + operation.done;
  if (fault.action == FaultAction::kBitFlip) {
    const bool moved = result > fault.number;
    if (operation.request.kind == IoKind::kWrite || moved) memory[fault.number] ^= std::byte{1};
  } else if (fault.action == FaultAction::kTorn && result >= 0) {
    result = static_cast<std::int32_t>(std::min(operation.request.bytes - operation.done, kMostTransferBytes));
  } else if (fault.action == FaultAction::kDelay) {
    Span span("disk", "wait", &counters_.wait_seconds);
    std::this_thread::sleep_until(operation.ready_at);
  }
  const Fault seen = fault_at(FaultSite::kCqe, operation.request.file->name());
  if (seen.action == FaultAction::kErrno) result = static_cast<std::int32_t>(-seen.number);
  if (seen.action == FaultAction::kShort) result = std::min(result, static_cast<std::int32_t>(seen.number));
  if (seen.action == FaultAction::kDelay) std::this_thread::sleep_for(std::chrono::milliseconds(seen.number));
}

void IoRing::take(const Completion& completion) {
  Operation& operation = operations_[completion.slot];
  std::int32_t result = completion.result;
  if (fault_plan() != nullptr) undo_fault(operation, result);
  const bool is_write = operation.request.kind == IoKind::kWrite;
  if (result > 0) return go_on(completion.slot, result);
  // When a thread ends, the kernel cancels the transfers that the thread has begun, so ECANCELED is retried too.
  if (result == -EAGAIN || result == -EINTR || result == -ECANCELED || (result == 0 && is_write))
    return retry(completion.slot, result);
  if (result == -EINVAL && operation.direct) {
    operation.buffered = true;
    warn_once(
        "refused " + operation.request.file->directory(),
        fmt::format("{}: the file system of {} refused a {} with O_DIRECT that it took before; it goes through the "
                    "page cache now",
                    operation.request.who, operation.request.file->directory(), verb(operation.request.kind)));
    return retry(completion.slot, result);
  }
  end(completion.slot, error_of(operation, -result));
}

void IoRing::go_on(std::uint32_t slot, std::int32_t result) {
  Operation& operation = operations_[slot];
  operation.done += static_cast<std::size_t>(result);
  operation.fruitless = 0;
  if (operation.done >= operation.request.bytes) return end(slot, absl::OkStatus());
  ++counters_.resumed;
  to_begin_.push_back(slot);
}

void IoRing::retry(std::uint32_t slot, std::int32_t result) {
  Operation& operation = operations_[slot];
  if (++operation.fruitless > kMostFruitless) return end(slot, error_of(operation, result == 0 ? EIO : -result));
  if (operation.fruitless > kPatientFruitless) std::this_thread::sleep_for(kRetryPause);
  ++counters_.resumed;
  to_begin_.push_back(slot);
}

void IoRing::end(std::uint32_t slot, absl::Status status) {
  Operation& operation = operations_[slot];
  const IoRequest& request = operation.request;
  operation.active = false;
  --active_;
  if (!status.ok()) {
    failures_.emplace_back(request.tag, std::move(status));
    return;
  }
  const bool is_read = request.kind == IoKind::kRead;
  ++(is_read ? counters_.reads : counters_.writes);
  (is_read ? counters_.bytes_read : counters_.bytes_written) += static_cast<std::int64_t>(request.bytes);
}

absl::Status IoRing::error_of(const Operation& operation, int error) const {
  const IoRequest& request = operation.request;
  return file_error({.who = request.who,
                     .operation = verb(request.kind),
                     .file = request.file->name(),
                     .folder = request.file->directory(),
                     .offset = request.offset,
                     .wanted = static_cast<std::int64_t>(request.bytes),
                     .got = static_cast<std::int64_t>(operation.done),
                     .error = error});
}

absl::Status IoRing::broken(absl::Status status) {
  if (broken_.ok()) broken_ = std::move(status);
  return broken_;
}

}  // namespace tessera
