#include "runtime/base/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "runtime/base/bytes.h"
#include "runtime/base/errno_hint.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kFirstBytes = 64 << 10;  // size of the first buffer for a pipe's content

/// Returns the exit code for an input: 66 for those errors for which an output gets 73 (kCannotCreate).
ExitCode exit_code_of_input(int error) {
  const ExitCode code = exit_code_of_errno(error);
  return code == ExitCode::kCannotCreate ? ExitCode::kNoInput : code;
}

std::string name_of(const std::filesystem::path& path, const std::string& kind) {
  return kind.empty() ? path.string() : kind + " " + path.string();
}

const char* word_for(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISFIFO(mode)) return "a pipe";
  return "a device or socket";
}

absl::Status refuse(const std::filesystem::path& path, const std::string& kind, mode_t mode) {
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{} is {}, want a regular file. [T0416] hint: name the file itself",
                                name_of(path, kind), word_for(mode)));
}

/// Opens a file of any kind, and writes its kind and its size to `info`. The open itself does not wait (O_NONBLOCK).
/// Opening a pipe would otherwise wait for its writer, before fstat can show that the file is a pipe.
absl::StatusOr<int> open_any(const std::filesystem::path& path, const std::string& kind, struct stat& info,
                             int more_flags = 0) {
  if (path.native().empty())
    return make_error(ExitCode::kUsage, (kind.empty() ? "file" : kind) + ": an empty path. [T0417] hint: name a file");
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY | more_flags);
  if (fd < 0) {
    const int error = errno;
    if (error == ELOOP && (more_flags & O_NOFOLLOW) != 0 && std::filesystem::is_symlink(path))
      return make_error(
          ExitCode::kCorruptData,
          fmt::format("{} is a link, and links in a folder are not followed. [T0418] hint: put in its place what it "
                      "leads to, or name that",
                      name_of(path, kind)));
    // A socket's file cannot be opened by any process.
    if (error == ENXIO && ::stat(path.c_str(), &info) == 0 && !S_ISREG(info.st_mode))
      return refuse(path, kind, info.st_mode);
    return input_error(path, kind, "cannot be opened", error);
  }
  if (::fstat(fd, &info) == 0) return fd;
  const int error = errno;
  ::close(fd);
  return input_error(path, kind, "cannot be looked at", error);
}

/// Returns true after data has arrived, or after the pipe's writer has closed it. Returns false if neither happens
/// within kPipeSeconds.
bool wait_for_pipe(int fd) {
  pollfd poll_for{fd, POLLIN, 0};
  int got;
  do {
    got = ::poll(&poll_for, 1, kPipeSeconds * 1000);
  } while (got < 0 && errno == EINTR);
  return got > 0;
}

}  // namespace

absl::Status input_error(const std::filesystem::path& path, const std::string& kind, const char* what, int error) {
  return make_error(exit_code_of_input(error),
                    fmt::format("{}: {}: {}", name_of(path, kind), what, reason_of_reading(error)));
}

absl::StatusOr<InputFile> InputFile::open(const std::filesystem::path& path, const std::string& kind) {
  struct stat info {};
  TESSERA_ASSIGN_OR_RETURN(const int fd, open_any(path, kind, info));
  InputFile file(fd, static_cast<std::size_t>(info.st_size));
  if (!S_ISREG(info.st_mode)) return refuse(path, kind, info.st_mode);
  return file;
}

namespace {

absl::StatusOr<std::string> read_text(const std::filesystem::path& path, const std::string& kind,
                                      std::size_t most_bytes, ExitCode too_large, int more_flags) {
  struct stat info {};
  TESSERA_ASSIGN_OR_RETURN(const int fd, open_any(path, kind, info, more_flags));
  const OwnedFd closer(fd);
  const bool is_pipe = S_ISFIFO(info.st_mode);
  if (!is_pipe && !S_ISREG(info.st_mode)) return refuse(path, kind, info.st_mode);
  const auto refuse_as_too_large = [&] {
    return make_error(too_large,
                      fmt::format("{}:1:1: /: larger than {}: this is not a {}. [T0419] hint: name the right file",
                                  path.string(), format_bytes(static_cast<std::int64_t>(most_bytes)), kind));
  };
  if (!is_pipe && static_cast<std::size_t>(info.st_size) > most_bytes) return refuse_as_too_large();
  // There is room for one byte more than the known size, so that a read can find the end of the file: a pipe's size is
  // unknown, and a file may grow.
  std::string text((is_pipe ? std::min(kFirstBytes, most_bytes) : static_cast<std::size_t>(info.st_size)) + 1, '\0');
  std::size_t done = 0;
  while (done <= most_bytes) {
    if (done == text.size()) text.resize(std::min(2 * text.size(), most_bytes + 1));
    if (is_pipe && !wait_for_pipe(fd))
      return make_error(ExitCode::kCorruptData,
                        fmt::format("{} is a pipe that nobody wrote to for {} s. [T0420] hint: name a regular file",
                                    name_of(path, kind), kPipeSeconds));
    const ssize_t got = ::read(fd, text.data() + done, text.size() - done);
    if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (got < 0) return input_error(path, kind, "cannot be read", errno);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  if (done > most_bytes) return refuse_as_too_large();
  text.resize(done);
  return text;
}

}  // namespace

absl::StatusOr<std::string> read_input_file(const std::filesystem::path& path, const std::string& kind,
                                            std::size_t most_bytes, ExitCode too_large) {
  return read_text(path, kind, most_bytes, too_large, 0);
}

absl::StatusOr<std::string> read_input_file_in(const std::filesystem::path& folder, const std::string& name,
                                               const std::string& kind, std::size_t most_bytes, ExitCode too_large) {
  return read_text(folder / name, kind, most_bytes, too_large, O_NOFOLLOW);
}

}  // namespace tessera
