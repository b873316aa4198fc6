#include "offload/files/block_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "offload/files/aligned_memory.h"
#include "offload/files/fault_environment.h"
#include "offload/files/file_calls.h"
#include "offload/files/file_error.h"
#include "offload/files/retries.h"
#include "offload/files/scratch_directory.h"
#include "offload/files/sector.h"
#include "offload/files/warn_once.h"
#include "runtime/base/status.h"

namespace tessera {
namespace {

constexpr std::size_t kZeroBytes = std::size_t{4} << 20;

std::string next_name(const std::string& directory) {
  static std::atomic<int> files{0};
  return fmt::format("{}/tessera-scratch-{}-{}", directory, ::getpid(), files.fetch_add(1));
}

struct Opened {
  int fd = -1;
  bool has_name = false;
};

// Opens a file without a name if the file system can make one. Otherwise the file gets an unused name, which the caller
// removes.
Opened open_scratch(const std::string& directory, const std::string& name) {
  constexpr mode_t kOwnerOnly = 0600;
  const int fd = file_calls::open_unnamed(directory, name, kOwnerOnly);
  if (fd >= 0 || (fd != -EOPNOTSUPP && fd != -EISDIR && fd != -EINVAL)) return {fd, false};
  return {file_calls::open(name, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, kOwnerOnly), true};
}

}  // namespace

absl::StatusOr<std::unique_ptr<BlockFile>> BlockFile::create(const BlockFileOptions& options) {
  TESSERA_RETURN_IF_ERROR(take_faults_from_environment());
  if (options.bytes <= 0 || !in_sectors(static_cast<std::uint64_t>(options.bytes)))
    return make_error(ExitCode::kInternal,
                      fmt::format("{}: a scratch file of {} bytes: want a multiple of {}, more than 0", options.who,
                                  options.bytes, kSectorBytes));
  TESSERA_ASSIGN_OR_RETURN(const ScratchDirectory directory, look_at_scratch_directory(options.directory, options.who));
  std::unique_ptr<BlockFile> file(new BlockFile);
  file->is_kept_ = !options.name.empty();
  file->name_ = file->is_kept_ ? options.directory + "/" + options.name : next_name(options.directory);
  file->directory_ = options.directory;
  file->bytes_ = options.bytes;
  TESSERA_RETURN_IF_ERROR(file->open(options, directory.in_memory));
  TESSERA_RETURN_IF_ERROR(file->take_room(options));
  return file;
}

absl::Status BlockFile::open(const BlockFileOptions& options, bool in_memory) {
  if (is_kept_) {
    TESSERA_RETURN_IF_ERROR(open_kept(options));
  } else {
    const Opened opened = open_scratch(directory_, name_);
    if (opened.fd < 0) return error(options, "open", -opened.fd, -1, -1, -1);
    fd_ = buffered_fd_ = opened.fd;
    if (opened.has_name) {
      if (const int got = file_calls::unlink(name_); got < 0) {
        file_calls::unlink_surely(name_);
        return error(options, "unlink", -got, -1, -1, -1);
      }
    }
  }
  if (!options.direct) {
    mode_ = "page cache, as asked for";
  } else if (in_memory) {
    mode_ = "page cache, because tmpfs is memory already";
  } else if (const int got = try_direct(/*may_write=*/!was_there_); got != 0) {
    return error(options, "open with O_DIRECT", got, -1, -1, -1);
  } else if (!direct_) {
    warn_once("no O_DIRECT " + directory_, fmt::format("{}: files in {} go through the {}: they take memory twice and "
                                                       "are slower. [T0370] hint: name a directory on ext4 or XFS",
                                                       options.who, directory_, mode_));
  }
  return absl::OkStatus();
}

// Opens a file that stays. A file of another size is useless, so a new file replaces it.
absl::Status BlockFile::open_kept(const BlockFileOptions& options) {
  constexpr mode_t kOwnerOnly = 0600;
  constexpr int kFlags = O_RDWR | O_CLOEXEC;
  int fd = file_calls::open(name_, kFlags, kOwnerOnly);
  std::int64_t bytes = -1;  // -1: there is no file
  if (fd >= 0) {
    struct stat seen {};
    bytes = ::fstat(fd, &seen) == 0 && S_ISREG(seen.st_mode) ? seen.st_size : -1;
    was_there_ = bytes == options.bytes;
  }
  if (fd < 0 && fd != -ENOENT) return error(options, "open", -fd, -1, -1, -1);
  if (!was_there_ && options.must_be_there) {
    if (fd >= 0) ::close(fd);
    return make_error(
        ExitCode::kCorruptData,
        fmt::format("{}: {} holds a part of the last commit, and {}, want {} bytes. [T0371] hint: put the file back, "
                    "or begin anew in another folder",
                    options.who, name_, bytes < 0 ? "is missing" : fmt::format("has {} bytes", bytes), options.bytes));
  }
  if (fd >= 0 && !was_there_) {
    ::close(fd);
    if (const int got = file_calls::unlink(name_); got < 0) return error(options, "unlink", -got, -1, -1, -1);
    fd = -ENOENT;
  }
  if (fd == -ENOENT) fd = file_calls::open(name_, kFlags | O_CREAT | O_EXCL, kOwnerOnly);
  if (fd < 0) return error(options, "open", -fd, -1, -1, -1);
  fd_ = buffered_fd_ = fd;
  return absl::OkStatus();
}

// Tries O_DIRECT. Some file systems refuse it when the file is opened, other file systems only when the file is
// written. Returns an errno if a failure has nothing to do with O_DIRECT.
int BlockFile::try_direct(bool may_write) {
  const int fd = file_calls::open_again(buffered_fd_, name_, O_RDWR | O_DIRECT);
  if (fd == -EINVAL || fd == -EOPNOTSUPP || fd == -ENOENT) {
    mode_ = "page cache, because opening with O_DIRECT failed: " + errno_text(-fd);
    return 0;
  }
  if (fd < 0) return -fd;
  alignas(kSectorBytes) static const std::byte zeros[kSectorBytes] = {};
  alignas(kSectorBytes) std::byte seen[kSectorBytes];
  const ssize_t written = may_write ? file_calls::pwrite(fd, name_, zeros, kSectorBytes, 0)
                                    : file_calls::pread(fd, name_, seen, kSectorBytes, 0);
  if (written == static_cast<ssize_t>(kSectorBytes)) {
    fd_ = fd;
    direct_ = true;
    mode_ = "O_DIRECT";
    return 0;
  }
  ::close(fd);
  if (written < 0 && written != -EINVAL && written != -EOPNOTSUPP) return static_cast<int>(-written);
  mode_ =
      "page cache, because a write with O_DIRECT failed: " + errno_text(written < 0 ? static_cast<int>(-written) : EIO);
  return 0;
}

// A failed sync is never repeated, not even after EINTR: the kernel reports a lost write only once.
absl::Status BlockFile::sync(const std::string& who) const {
  const auto failed = [&](const char* operation, int got) {
    return file_error({.who = who, .operation = operation, .file = name_, .folder = directory_, .error = -got});
  };
  if (const int got = file_calls::fsync(buffered_fd_, name_); got < 0) return failed("fsync", got);
  if (!is_kept_) return absl::OkStatus();
  const char* operation = "fsync";
  if (const int got = file_calls::sync_folder_of(name_, operation); got < 0) return failed(operation, got);
  return absl::OkStatus();
}

absl::Status BlockFile::take_room(const BlockFileOptions& options) {
  const int got = retried([&] { return file_calls::reserve(buffered_fd_, name_, bytes_); });
  if (got == 0) return options.write_zeros && !was_there_ ? write_zeros(options) : absl::OkStatus();
  // This file system cannot reserve space; writing zeros takes the space as well.
  if (got == -EOPNOTSUPP) return was_there_ ? absl::OkStatus() : write_zeros(options);
  return error(options, "reservation", -got, -1, bytes_, -1);
}

absl::Status BlockFile::write_zeros(const BlockFileOptions& options) {
  TESSERA_ASSIGN_OR_RETURN(
      const AlignedMemory zeros,
      AlignedMemory::make(static_cast<std::size_t>(std::min<std::int64_t>(bytes_, kZeroBytes)), options.who));
  std::int64_t done = 0;
  for (int retries = 0; done < bytes_;) {
    const auto wanted = std::min(bytes_ - done, static_cast<std::int64_t>(zeros.bytes()));
    const int fd = in_sectors(static_cast<std::uint64_t>(done)) ? fd_ : buffered_fd_;
    const ssize_t got = file_calls::pwrite(fd, name_, zeros.data(), static_cast<std::size_t>(wanted), done);
    if (got > 0) {
      done += got;
      retries = 0;
    } else if ((got != 0 && !is_worth_retrying(static_cast<int>(-got))) || ++retries > kMostRetries) {
      return error(options, "write of zeros", got == 0 ? EIO : static_cast<int>(-got), done, bytes_, done);
    }
  }
  return absl::OkStatus();
}

absl::Status BlockFile::error(const BlockFileOptions& options, const char* operation, int error, std::int64_t offset,
                              std::int64_t wanted, std::int64_t got) const {
  return file_error({.who = options.who,
                     .operation = operation,
                     .file = name_,
                     .folder = directory_,
                     .offset = offset,
                     .wanted = wanted,
                     .got = got,
                     .error = error});
}

BlockFile::~BlockFile() {
  if (buffered_fd_ >= 0 && buffered_fd_ != fd_) ::close(buffered_fd_);
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace tessera
