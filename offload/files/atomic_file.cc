#include "offload/files/atomic_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr int kMostNames = 100;

/// The temporary file, until it is renamed. The destructor closes the file, and removes it unless it was renamed, so no
/// failed write leaves a file behind.
class TemporaryFile {
 public:
  TemporaryFile(const FilePlace& file, const std::string& who)
      : target_(file), temporary_(file), who_(who), folder_(folder_of_file(file.path())) {}
  ~TemporaryFile() {
    if (fd_ >= 0) ::close(fd_);
    if (!exists_) return;
    if (file_calls::unlink(temporary_) == 0) return;
    if (const int got = file_calls::unlink_surely(temporary_); got < 0)
      log_warning(
          fmt::format("{}: the temporary file {} could not be removed: {}", who_, temporary_.path(), errno_text(-got)));
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  // Opens a file with an unused name. An earlier process with the same process ID may have left a file with this name
  // when it was killed; then the next number is tried.
  absl::Status open(mode_t mode) {
    static std::atomic<std::uint64_t> numbers{0};
    int got = -EEXIST;
    for (int tries = 0; got == -EEXIST && tries < kMostNames; ++tries) {
      temporary_ =
          FilePlace(fmt::format("{}.tmp-{}-{}", target_.path(), ::getpid(), numbers.fetch_add(1)), target_.parts());
      got = retried([&] { return file_calls::open(temporary_, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, mode); });
    }
    if (got < 0) return error("create", -got, -1, -1, -1);
    fd_ = got;
    exists_ = true;
    // The mode is exactly `mode`, whatever the umask.
    return ::fchmod(fd_, mode) == 0 ? absl::OkStatus() : error("set the mode", errno, -1, -1, -1);
  }

  absl::Status write(std::span<const std::byte> bytes) {
    std::size_t done = 0;
    const int got = file_calls::write_all(fd_, temporary_.path(), bytes, 0, done);
    const auto written = static_cast<std::int64_t>(done);
    return got == 0 ? absl::OkStatus()
                    : error("write", -got, written, static_cast<std::int64_t>(bytes.size()), written);
  }

  // A failed sync is never repeated, not even after EINTR, since it is then unknown whether the data is on the disk.
  absl::Status sync() {
    const int got = file_calls::fsync(fd_, temporary_.path());
    return got == 0 ? absl::OkStatus() : error("fsync", -got, -1, -1, -1);
  }

  absl::Status close() {
    // Network file systems report a failed write here.
    if (::close(std::exchange(fd_, -1)) != 0 && errno != EINTR) return error("close", errno, -1, -1, -1);
    return absl::OkStatus();
  }

  absl::Status rename() {
    const int got = retried([&] { return file_calls::rename(temporary_, target_); });
    if (got < 0) return error("rename", -got, -1, -1, -1);
    exists_ = false;
    return absl::OkStatus();
  }

  absl::Status sync_folder() {
    const char* operation = nullptr;
    const int got = file_calls::sync_folder_of(target_, operation);
    return got == 0 ? absl::OkStatus() : error(operation, -got, -1, -1, -1);
  }

 private:
  absl::Status error(const char* operation, int error, std::int64_t offset, std::int64_t wanted,
                     std::int64_t got) const {
    return file_error({.who = who_,
                       .operation = operation,
                       .file = target_.path(),
                       .folder = folder_,
                       .offset = offset,
                       .wanted = wanted,
                       .got = got,
                       .error = error});
  }

  const FilePlace target_;
  FilePlace temporary_;
  const std::string who_, folder_;
  int fd_ = -1;
  bool exists_ = false;
};

}  // namespace

absl::Status write_file_atomically(const FilePlace& file, std::span<const std::byte> bytes, const std::string& who,
                                   mode_t mode) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  if (file.path().empty())
    return make_error(ExitCode::kConfig, who + ": the path of a file to write is empty. [T0369] hint: name one");
  TemporaryFile temporary(file, who);
  TESSERA_RETURN_IF_ERROR(temporary.open(mode));
  TESSERA_RETURN_IF_ERROR(temporary.write(bytes));
  TESSERA_RETURN_IF_ERROR(temporary.sync());
  TESSERA_RETURN_IF_ERROR(temporary.close());
  TESSERA_RETURN_IF_ERROR(temporary.rename());
  return temporary.sync_folder();
}

absl::Status make_folders(const std::string& folder, const std::string& who) {
  namespace fs = std::filesystem;
  std::vector<std::string> made;  // folders that must be made, the innermost first
  std::error_code error;
  for (fs::path path = fs::path(folder).lexically_normal(); !path.empty() && !fs::exists(path, error);
       path = path.parent_path()) {
    if (path.has_filename()) made.push_back(path.string());
  }
  const auto failed = [&](const char* operation, const std::string& file, int code) {
    return file_error({.who = who, .operation = operation, .file = file, .error = code});
  };
  fs::create_directories(folder, error);
  if (error) return failed("create", folder, error.value());
  for (const std::string& each : made) {
    const char* operation = "fsync";
    if (const int got = file_calls::sync_folder_of(each, operation); got < 0)
      return failed(operation, folder_of_file(each), -got);
  }
  return absl::OkStatus();
}

}  // namespace tessera
