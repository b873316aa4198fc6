#include "checkpoint/files/regular_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "checkpoint/files/damage.h"
#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

}  // namespace

int parts_of_checkpoint(const std::string& path) {
  return fs::path(path).parent_path().filename().native().starts_with("step-") ? 2 : 1;
}

absl::StatusOr<RegularFile> RegularFile::open(const std::string& path, const std::string& who, int parts) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  // O_NONBLOCK is needed because opening a pipe would wait for its writer before fstat can tell what kind of file it
  // is.
  const FilePlace file(path, parts);
  const int fd = retried([&] { return file_calls::open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0); });
  if (fd == -ELOOP)
    return make_error(ExitCode::kCorruptData, who + ": " + file.first_link() +
                                                  " is a link, and links are not followed. [T0078] hint: put in its "
                                                  "place what it leads to, or name that");
  if (fd < 0 && fd != -ENXIO) return input_error(path, who + ":", "cannot be opened", -fd);  // ENXIO: a socket
  struct stat info {};
  const bool is_regular = fd >= 0 && ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  if (is_regular) return RegularFile(path, who, fd, info.st_size);
  if (fd >= 0) ::close(fd);
  return make_error(
      ExitCode::kCorruptData,
      who + ": " + path + " is no regular file. [T0079] hint: name a regular file, or put one in its place");
}

absl::Status RegularFile::read(std::int64_t offset, std::span<std::byte> bytes) const {
  std::size_t done = 0;
  for (int fruitless = 0; done < bytes.size();) {
    const ssize_t got = file_calls::pread(fd_.get(), path_, bytes.data() + done, bytes.size() - done,
                                          static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
      fruitless = 0;
    } else if (got == 0 || !is_worth_retrying(static_cast<int>(-got)) || ++fruitless > kMostRetries) {
      return file_error({.who = who_,
                         .operation = "read",
                         .file = path_,
                         .offset = offset,
                         .wanted = static_cast<std::int64_t>(bytes.size()),
                         .got = static_cast<std::int64_t>(done),
                         .error = static_cast<int>(-got)});
    }
  }
  return absl::OkStatus();
}

void RegularFile::read_in_order() const { (void)::posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_SEQUENTIAL); }

absl::StatusOr<std::string> read_regular_text(const std::string& path, std::int64_t most_bytes, const std::string& who,
                                              int parts) {
  TESSERA_ASSIGN_OR_RETURN(const RegularFile file, RegularFile::open(path, who, parts));
  if (file.bytes() > most_bytes)
    return make_error(ExitCode::kCorruptData, fmt::format("{}: {} has {} bytes, a file of its kind has at most {}{}",
                                                          who, path, file.bytes(), most_bytes, kDamagedFileHint));
  std::string text(static_cast<std::size_t>(file.bytes()), '\0');
  TESSERA_RETURN_IF_ERROR(file.read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

}  // namespace tessera
