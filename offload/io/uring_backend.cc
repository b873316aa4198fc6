#include <fmt/format.h>
#include <liburing.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <thread>
#include <vector>

#include "offload/files/block_file.h"
#include "offload/files/file_error.h"
#include "offload/io/io_backend.h"
#include "runtime/base/bytes.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMostBufferBytes = std::size_t{1} << 30;  // the kernel's limit for the size of a registered
                                                                // buffer
constexpr int kMostRetries = 1000;

// A combination of flags for creating an io_uring. In kSetups the best combination is first; older kernels return
// EINVAL for it.
struct Setup {
  unsigned flags;
  const char* text;
};
constexpr std::array<Setup, 3> kSetups = {{
    {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_R_DISABLED,
     "single issuer, deferred work"},
    {IORING_SETUP_COOP_TASKRUN, "cooperative work"},
    {0, "no flags"},
}};

std::string hint_of(int error) {
  switch (error) {
    case EPERM:
    case EACCES:
    case ENOSYS:
      return "[T0383] hint: allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp "
             "profile, and set kernel.io_uring_disabled=0; the kernel must be 5.6 or newer";
    case ENOMEM:
      return "[T0384] hint: raise the limit of locked memory (ulimit -l)";
    case EMFILE:
    case ENFILE:
      return "[T0385] hint: raise the limit of open files (ulimit -n)";
    default:
      return "[T0386] hint: use Linux 5.6 or newer";
  }
}

absl::Status unavailable(const char* what, int error) {
  return make_error(ExitCode::kUnavailable,
                    fmt::format("io_uring: {}: {}. {}", what, errno_text(error), hint_of(error)));
}

bool knows_read_and_write(io_uring& ring) {
  io_uring_probe* const probe = io_uring_get_probe_ring(&ring);
  if (probe == nullptr) return false;
  const bool knows =
      io_uring_opcode_supported(probe, IORING_OP_READ) && io_uring_opcode_supported(probe, IORING_OP_WRITE);
  io_uring_free_probe(probe);
  return knows;
}

bool is_passing(int error) { return error == EINTR || error == EAGAIN || error == EBUSY; }

class UringBackend final : public IoBackend {
 public:
  UringBackend() = default;
  ~UringBackend() override {
    if (is_open_) io_uring_queue_exit(&ring_);
  }

  absl::Status open(int queue_entries, bool one_thread) {
    int got = -EINVAL;
    for (const Setup& setup : kSetups) {
      if (!one_thread && (setup.flags & IORING_SETUP_SINGLE_ISSUER) != 0) continue;
      got = io_uring_queue_init(static_cast<unsigned>(queue_entries), &ring_, setup.flags);
      setup_ = &setup;
      if (got != -EINVAL) break;
    }
    if (got < 0) return unavailable("io_uring_setup", -got);
    is_open_ = true;
    if (!knows_read_and_write(ring_))
      return unavailable("this kernel's io_uring knows no plain read and write", EINVAL);
    return absl::OkStatus();
  }

  std::string describe() const override {
    return fmt::format("io_uring ({}; {} and {} registered)", setup_->text, counted(files_.size(), "file"),
                       format_bytes(static_cast<std::int64_t>(registered_bytes_)));
  }

  bool enqueue(const Transfer& transfer) override {
    io_uring_sqe* const sqe = io_uring_get_sqe(&ring_);
    if (sqe == nullptr) return false;
    const int buffer = buffer_of(transfer);
    const int file = file_of(transfer);
    const int fd = file >= 0 ? file : transfer.fd;
    const auto offset = static_cast<std::uint64_t>(transfer.offset);
    if (transfer.kind == IoKind::kRead) {
      if (buffer >= 0) {
        io_uring_prep_read_fixed(sqe, fd, transfer.memory, transfer.bytes, offset, buffer);
      } else {
        io_uring_prep_read(sqe, fd, transfer.memory, transfer.bytes, offset);
      }
    } else if (buffer >= 0) {
      io_uring_prep_write_fixed(sqe, fd, transfer.memory, transfer.bytes, offset, buffer);
    } else {
      io_uring_prep_write(sqe, fd, transfer.memory, transfer.bytes, offset);
    }
    if (file >= 0) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, transfer.slot);
    return true;
  }

  absl::Status push() override {
    TESSERA_RETURN_IF_ERROR(enable());
    for (int tries = 0; io_uring_sq_ready(&ring_) > 0;) {
      const int got = io_uring_submit(&ring_);
      if (got > 0) continue;
      if (got < 0 && !is_passing(-got)) return broken("io_uring_submit", -got);
      // The completion queue is full, or the kernel has not enough memory. If completions have arrived, `collect` must
      // first take them; a later call of `push` then submits the rest.
      if (++tries > 1 && io_uring_cq_ready(&ring_) > 0) return absl::OkStatus();
      if (tries > kMostRetries) return broken("io_uring_submit, tried for a second,", got < 0 ? -got : EAGAIN);
      std::this_thread::sleep_for(kRetryPause);
      io_uring_get_events(&ring_);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::size_t> collect(std::span<Completion> out, bool wait) override {
    TESSERA_RETURN_IF_ERROR(enable());
    if (const std::size_t found = take(out); found > 0) return found;
    for (int tries = 0;; ++tries) {
      // If the kernel defers the work for completions (DEFER_TASKRUN), completions arrive only during this call.
      const int got = wait ? io_uring_submit_and_wait(&ring_, 1) : io_uring_submit_and_get_events(&ring_);
      if (got < 0 && !is_passing(-got)) return broken("io_uring_enter", -got);
      const std::size_t found = take(out);
      if (found > 0 || !wait) return found;
      if (got == -EINTR || got >= 0) tries = 0;
      if (tries > kMostRetries) return broken("io_uring_enter, tried for a second,", -got);
      if (tries > 0) std::this_thread::sleep_for(kRetryPause);
    }
  }

  std::string register_resources(std::span<const BlockFile* const> files,
                                 std::span<const std::span<std::byte>> memory) override {
    std::vector<int> fds;
    for (const BlockFile* file : files) fds.push_back(file->fd());
    const int got_files =
        fds.empty() ? 0 : io_uring_register_files(&ring_, fds.data(), static_cast<unsigned>(fds.size()));
    if (got_files == 0) files_.assign(files.begin(), files.end());
    std::vector<iovec> buffers;
    for (std::span<std::byte> rest : memory) {
      for (; !rest.empty(); rest = rest.subspan(buffers.back().iov_len))
        buffers.push_back({rest.data(), std::min(rest.size(), kMostBufferBytes)});
    }
    const int got_memory =
        buffers.empty() ? 0 : io_uring_register_buffers(&ring_, buffers.data(), static_cast<unsigned>(buffers.size()));
    if (got_memory == 0) buffers_ = buffers;
    for (const iovec& buffer : buffers_) registered_bytes_ += buffer.iov_len;
    std::string lacks;
    if (got_files < 0) lacks = "files: " + errno_text(-got_files);
    if (got_memory < 0) lacks += (lacks.empty() ? "memory: " : "; memory: ") + errno_text(-got_memory);
    return lacks;
  }

 private:
  // The ring was created disabled, so that the first thread that uses it becomes its owner, even if another thread
  // created it.
  absl::Status enable() {
    if (is_enabled_) return absl::OkStatus();
    is_enabled_ = true;
    if ((setup_->flags & IORING_SETUP_R_DISABLED) == 0) return absl::OkStatus();
    const int got = io_uring_enable_rings(&ring_);
    return got < 0 ? broken("io_uring_enable_rings", -got) : absl::OkStatus();
  }

  std::size_t take(std::span<Completion> out) {
    std::array<io_uring_cqe*, 64> entries;
    const unsigned found =
        io_uring_peek_batch_cqe(&ring_, entries.data(), static_cast<unsigned>(std::min(out.size(), entries.size())));
    for (unsigned i = 0; i < found; ++i)
      out[i] = {static_cast<std::uint32_t>(io_uring_cqe_get_data64(entries[i])), entries[i]->res};
    io_uring_cq_advance(&ring_, found);
    return found;
  }

  int buffer_of(const Transfer& transfer) const {
    for (std::size_t i = 0; i < buffers_.size(); ++i) {
      const auto* const begin = static_cast<const std::byte*>(buffers_[i].iov_base);
      if (transfer.memory >= begin && transfer.memory + transfer.bytes <= begin + buffers_[i].iov_len)
        return static_cast<int>(i);
    }
    return -1;
  }

  int file_of(const Transfer& transfer) const {
    const auto found = std::ranges::find(files_, transfer.file);
    if (found == files_.end() || transfer.fd != transfer.file->fd()) return -1;
    return static_cast<int>(found - files_.begin());
  }

  static absl::Status broken(const char* what, int error) {
    return make_error(
        exit_code_of_errno(error),
        fmt::format("{} failed: {}. [T0387] hint: the kernel gave io_uring up (see dmesg); without it, such as by "
                    "sysctl kernel.io_uring_disabled=2, disk I/O goes through threads",
                    what, errno_text(error)));
  }

  io_uring ring_{};
  const Setup* setup_ = nullptr;
  bool is_open_ = false;
  bool is_enabled_ = false;
  std::vector<const BlockFile*> files_;
  std::vector<iovec> buffers_;
  std::size_t registered_bytes_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<IoBackend>> make_uring_backend(int queue_entries, bool one_thread) {
  auto backend = std::make_unique<UringBackend>();
  TESSERA_RETURN_IF_ERROR(backend->open(queue_entries, one_thread));
  return backend;
}

}  // namespace tessera
