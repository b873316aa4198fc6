#include "checkpoint/shard_reader.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string_view>
#include <utility>

#include "checkpoint/hash.h"
#include "offload/fault_environment.h"
#include "offload/file_calls.h"
#include "offload/file_error.h"
#include "offload/retries.h"
#include "runtime/base/input_file.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

/// Opens a regular file for reading, and says how long it is.
absl::StatusOr<int> open_regular(const std::string& path, const std::string& who, std::int64_t& bytes) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  // O_NONBLOCK, since opening a pipe would wait for its writer before fstat can tell what it is.
  const int fd = retried([&] { return file_calls::open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK, 0); });
  if (fd == -ELOOP)
    return make_error(ExitCode::kCorruptData, who + ": " + path + " is a link, and links are not followed");
  if (fd < 0) return input_error(path, who + ":", "cannot be opened", -fd);
  struct stat info {};
  const bool is_regular = ::fstat(fd, &info) == 0 && S_ISREG(info.st_mode);
  bytes = info.st_size;
  if (is_regular) return fd;
  ::close(fd);
  return make_error(ExitCode::kCorruptData, who + ": " + path + " is no regular file");
}

absl::Status read_all(int fd, const std::string& path, const std::string& who, std::int64_t offset,
                      std::span<std::byte> bytes) {
  std::size_t done = 0;
  for (int fruitless = 0; done < bytes.size();) {
    const ssize_t got = file_calls::pread(fd, path, bytes.data() + done, bytes.size() - done,
                                          static_cast<off_t>(offset) + static_cast<off_t>(done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
      fruitless = 0;
    } else if (got == 0 || !is_worth_retrying(static_cast<int>(-got)) || ++fruitless > kMostRetries) {
      return file_error({.who = who,
                         .operation = "read",
                         .file = path,
                         .offset = offset,
                         .wanted = static_cast<std::int64_t>(bytes.size()),
                         .got = static_cast<std::int64_t>(done),
                         .error = static_cast<int>(-got)});
    }
  }
  return absl::OkStatus();
}

}  // namespace

ShardReader::ShardReader(std::string folder, const SavedFile& file, std::string who)
    : path_(std::move(folder) + "/" + file.name), who_(std::move(who)), file_(file) {}

ShardReader::ShardReader(ShardReader&& other) noexcept
    : path_(other.path_), who_(other.who_), file_(other.file_), fd_(std::exchange(other.fd_, -1)) {}

ShardReader::~ShardReader() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status ShardReader::open() {
  if (fd_ >= 0) return absl::OkStatus();
  std::int64_t bytes = 0;
  TESSERA_ASSIGN_OR_RETURN(fd_, open_regular(path_, who_, bytes));
  if (bytes == file_.bytes) return absl::OkStatus();
  return make_error(ExitCode::kCorruptData,
                    fmt::format("{}: {} has {} bytes, the manifest wants {}", who_, path_, bytes, file_.bytes));
}

absl::Status ShardReader::read(std::int64_t offset, std::span<std::byte> bytes) {
  TESSERA_RETURN_IF_ERROR(open());
  return read_all(fd_, path_, who_, offset, bytes);
}

absl::StatusOr<ShardHeader> ShardReader::read_header() {
  TESSERA_RETURN_IF_ERROR(open());  // before memory is taken for what might not be there
  std::string head(static_cast<std::size_t>(file_.header_bytes), '\0');
  TESSERA_RETURN_IF_ERROR(read(0, std::as_writable_bytes(std::span(head))));
  if (const std::uint64_t got = checkpoint_hash(head); got != file_.header_hash)
    return make_error(ExitCode::kCorruptData,
                      fmt::format("{}: {}: the header at offset 0 is damaged: its {} bytes have the hash {}, wanted {}",
                                  who_, path_, head.size(), hash_text(got), hash_text(file_.header_hash)));
  return tessera::read_header(who_ + ": " + path_, head, file_.data_bytes());
}

absl::Status ShardReader::read_chunk(std::int64_t chunk, std::vector<std::byte>& bytes, const Describe& describe) {
  const std::int64_t begin = chunk * SavedFile::kChunkBytes;
  const std::int64_t end = std::min(begin + SavedFile::kChunkBytes, file_.data_bytes());
  bytes.resize(static_cast<std::size_t>(end - begin));
  TESSERA_RETURN_IF_ERROR(read(file_.header_bytes + begin, bytes));
  const std::uint64_t wanted = file_.chunk_hashes[static_cast<std::size_t>(chunk)], got = checkpoint_hash(bytes);
  if (got == wanted) return absl::OkStatus();
  return make_error(
      ExitCode::kCorruptData,
      fmt::format("{}: {}: the {} bytes at offset {} are damaged: they have the hash {}, wanted {}. They hold {}", who_,
                  path_, end - begin, file_.header_bytes + begin, hash_text(got), hash_text(wanted),
                  describe(begin, end)));
}

absl::StatusOr<std::string> read_checkpoint_text(const std::string& path, std::int64_t most_bytes,
                                                 const std::string& who) {
  std::int64_t bytes = 0;
  TESSERA_ASSIGN_OR_RETURN(const int fd, open_regular(path, who, bytes));
  std::string text;
  absl::Status status =
      bytes <= most_bytes
          ? absl::OkStatus()
          : make_error(ExitCode::kCorruptData, fmt::format("{}: {} has {} bytes, a file of its kind has at most {}",
                                                           who, path, bytes, most_bytes));
  if (status.ok()) {
    text.resize(static_cast<std::size_t>(bytes));
    status = read_all(fd, path, who, 0, std::as_writable_bytes(std::span(text)));
  }
  ::close(fd);
  if (!status.ok()) return status;
  return text;
}

}  // namespace tessera
