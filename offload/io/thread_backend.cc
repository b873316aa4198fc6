#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "offload/io/io_backend.h"
#include "runtime/base/log.h"
#include "runtime/base/mutex.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

class ThreadBackend final : public IoBackend {
 public:
  // An IoRing has at most 64 requests in flight, so no memory is allocated later.
  ThreadBackend() {
    queued_.reserve(64);
    work_.reserve(64);
    completions_.reserve(64);
  }
  ~ThreadBackend() override {
    {
      const MutexLock lock(mutex_);
      is_ending_ = true;
    }
    has_work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  absl::Status start(int threads) {
    try {
      for (int i = 0; i < threads; ++i) threads_.emplace_back([this, rank = log_rank()] { serve(rank); });
    } catch (const std::system_error& error) {
      return make_error(ExitCode::kOsResource, fmt::format("cannot start thread {} of {} for reads and writes: {}. "
                                                           "[T0381] hint: raise the limit of threads (ulimit -u)",
                                                           threads_.size() + 1, threads, error.what()));
    }
    return absl::OkStatus();
  }

  std::string describe() const override { return fmt::format("{} threads with pread and pwrite", threads_.size()); }

  bool enqueue(const Transfer& transfer) override {
    queued_.push_back(transfer);
    return true;
  }

  absl::Status push() override {
    if (queued_.empty()) return absl::OkStatus();
    {
      const MutexLock lock(mutex_);
      work_.insert(work_.end(), queued_.begin(), queued_.end());
    }
    for (std::size_t i = 0; i < queued_.size(); ++i) has_work_.notify_one();
    queued_.clear();
    return absl::OkStatus();
  }

  absl::StatusOr<std::size_t> collect(std::span<Completion> out, bool wait) override {
    TESSERA_RETURN_IF_ERROR(push());
    const MutexLock lock(mutex_);
    while (wait && completions_.empty()) has_completions_.wait(mutex_);
    const std::size_t found = std::min(out.size(), completions_.size());
    std::copy_n(completions_.begin(), found, out.begin());
    completions_.erase(completions_.begin(), completions_.begin() + static_cast<std::ptrdiff_t>(found));
    return found;
  }

  std::string register_resources(std::span<const BlockFile* const>, std::span<const std::span<std::byte>>) override {
    return "";  // registering files would save nothing for threads
  }

 private:
  static std::int32_t move(const Transfer& transfer) {
    const ssize_t moved = transfer.kind == IoKind::kRead
                              ? ::pread(transfer.fd, transfer.memory, transfer.bytes, transfer.offset)
                              : ::pwrite(transfer.fd, transfer.memory, transfer.bytes, transfer.offset);
    return static_cast<std::int32_t>(moved < 0 ? -errno : moved);
  }

  void serve(const LogRank& rank) {
    set_log_rank(rank);
    while (true) {
      Transfer transfer;
      {
        const MutexLock lock(mutex_);
        while (!is_ending_ && work_.empty()) has_work_.wait(mutex_);
        if (work_.empty()) return;  // submitted transfers are finished before the thread ends
        transfer = work_.front();
        work_.erase(work_.begin());
      }
      const Completion completion{transfer.slot, move(transfer)};
      const MutexLock lock(mutex_);
      completions_.push_back(completion);
      has_completions_.notify_one();
    }
  }

  std::vector<Transfer> queued_;  // used by the owner thread only
  std::vector<std::thread> threads_;
  Mutex mutex_;
  CondVar has_work_, has_completions_;
  std::vector<Transfer> work_ ABSL_GUARDED_BY(mutex_);  // submitted transfers, oldest first; at most 64
  std::vector<Completion> completions_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoBackend>> make_thread_backend(int threads) {
  auto backend = std::make_unique<ThreadBackend>();
  TESSERA_RETURN_IF_ERROR(backend->start(threads));
  return backend;
}

}  // namespace tessera
