#include "offload/files/output_file.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"

namespace tessera {

std::filesystem::path partial_of(const std::filesystem::path& path) { return path.string() + ".partial"; }

int create_partial(const std::filesystem::path& partial) {
  const auto create = [&] {
    return ::open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
  };
  const int fd = create();
  if (fd >= 0 || errno != EEXIST) return fd;
  struct stat there {};
  const bool is_gone =
      ::lstat(partial.c_str(), &there) == 0 && S_ISREG(there.st_mode) && ::unlink(partial.c_str()) == 0;
  return is_gone ? create() : fd;
}

absl::Status cannot_create(const std::string& what, int error) {
  return make_error(exit_code_of_creating(error), what + ": " + reason_of_writing(error));
}

absl::StatusOr<OutputFile> OutputFile::create(const std::filesystem::path& path, const std::string& what) {
  turn_size_signal_into_error();
  const std::filesystem::path partial = partial_of(path);
  const int fd = create_partial(partial);
  if (fd < 0) return cannot_create(what + ": cannot create " + partial.string(), errno);
  return OutputFile(path, partial, what, fd);
}

OutputFile::OutputFile(OutputFile&& other) noexcept
    : path_(std::move(other.path_)),
      partial_(std::move(other.partial_)),
      what_(std::move(other.what_)),
      fd_(std::exchange(other.fd_, -1)),
      is_kept_(std::exchange(other.is_kept_, true)) {}

OutputFile::~OutputFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!is_kept_) ::unlink(partial_.c_str());
}

absl::Status OutputFile::write_error(int error) const {
  return make_error(exit_code_of_errno(error),
                    what_ + ": cannot write " + partial_.string() + ": " + reason_of_writing(error));
}

absl::Status OutputFile::append(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t wrote = ::write(fd_, bytes.data(), bytes.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) return write_error(wrote < 0 ? errno : EIO);
    bytes.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return absl::OkStatus();
}

absl::Status OutputFile::finish(Existing existing) {
  if (::fsync(fd_) != 0 && errno != EINVAL) return write_error(errno);
  if (::close(std::exchange(fd_, -1)) != 0) return write_error(errno);
  return rename(existing);
}

absl::Status OutputFile::rename(Existing existing) {
  const std::string problem = what_ + ": cannot create " + path_.string();
  is_kept_ = true;
  if (existing == Existing::kKept) {
    if (::renameat2(AT_FDCWD, partial_.c_str(), AT_FDCWD, path_.c_str(), RENAME_NOREPLACE) == 0)
      return absl::OkStatus();
    if (errno == EEXIST)
      return make_error(ExitCode::kCannotCreate,
                        what_ + ": " + path_.string() +
                            " appeared while the job ran, and is kept. [T0377] hint: what this job made is in " +
                            partial_.string());
    if (errno != EINVAL && errno != ENOSYS) return cannot_create(problem, errno);
  }
  if (::rename(partial_.c_str(), path_.c_str()) == 0) return absl::OkStatus();
  return cannot_create(problem, errno);
}

}  // namespace tessera
