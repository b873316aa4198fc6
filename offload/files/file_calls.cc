#include "offload/files/file_calls.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <optional>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

#include "offload/files/aligned_memory.h"
#include "offload/files/fault_plan.h"
#include "offload/files/retries.h"
#include "offload/files/sector.h"
#include "offload/files/unsynced_files.h"
#include "runtime/base/process/process_limits.h"

// A function that finds a file by its path opens the file's folder first (FolderOfFile), part by part from the folder
// that a user named, and gives the system the folder's descriptor and the file's name. Each function passes its site of
// the FaultPlan before it calls the system, and reports changes to UnsyncedFiles afterwards.

namespace tessera {
namespace {

namespace fs = std::filesystem;

/// A path of which the first part, up to the user's folder, may have links.
struct SplitPath {
  fs::path folder, below;
};

/// Splits "a/b/c" into "a" and "b/c" for 2 parts.
SplitPath split(const FilePlace& place) {
  const fs::path path(place.path());
  SplitPath split{path.parent_path(), path.filename()};
  for (int part = 1; part < place.parts(); ++part) {
    split.below = split.folder.filename() / split.below;
    split.folder = split.folder.parent_path();
  }
  if (split.folder.empty()) split.folder = ".";
  return split;
}

}  // namespace

std::string FilePlace::first_link() const {
  const SplitPath parts = split(*this);
  fs::path each = parts.folder;
  std::error_code error;
  for (const fs::path& part : parts.below)
    if (fs::is_symlink(fs::symlink_status(each /= part, error))) return each.string();
  return path_;
}

namespace file_calls {
namespace {

template <typename Result>
Result negative_errno(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

/// Opens the folder `part` in the folder `at`, and closes `at`. Returns a negative errno if `part` is not a folder.
int open_next(int at, const fs::path& part) {
  int next = negative_errno(::openat(at, part.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC));
  ::close(at);
  struct stat seen {};
  if (next >= 0 && (::fstat(next, &seen) != 0 || !S_ISDIR(seen.st_mode))) {
    ::close(next);
    next = S_ISLNK(seen.st_mode) ? -ELOOP : -ENOTDIR;
  }
  return next;
}

/// The folder of a file, held open. A function of the system that takes a descriptor and a name (openat) finds the file
/// through this descriptor, even if the path is changed meanwhile. The path is opened part by part, each part from the
/// previous one, so that the part that is checked is the part that is used.
class FolderOfFile {
 public:
  explicit FolderOfFile(const FilePlace& file);
  ~FolderOfFile();
  FolderOfFile(const FolderOfFile&) = delete;
  FolderOfFile& operator=(const FolderOfFile&) = delete;

  /// Returns 0, or a negative errno if the folder cannot be opened: -ELOOP if a part of the path is a link.
  int error() const { return error_; }
  int fd() const { return fd_; }
  /// Returns the file's name in this folder.
  const char* name() const { return name_.c_str(); }
  /// Returns the flag that lets the system refuse a link with the file's name.
  int no_link() const;

 private:
  int fd_;  ///< AT_FDCWD for a user's folder
  int error_ = 0;
  std::string name_;
};

/// Returns the name by which a file is found in its folder: all of its path if the folder is not opened.
std::string name_in_folder(const FilePlace& file) {
  if (file.parts() == 0) return file.path();
  const fs::path name = split(file).below.filename();
  return name.empty() ? "." : name.string();
}

FolderOfFile::FolderOfFile(const FilePlace& file) : fd_(AT_FDCWD), name_(name_in_folder(file)) {
  if (file.parts() == 0) return;
  // One call of openat2 could do the same, but containers forbid it.
  const SplitPath parts = split(file);
  fd_ = negative_errno(::open(parts.folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  for (const fs::path& part : parts.below.parent_path()) {
    if (fd_ < 0) break;
    fd_ = open_next(fd_, part);
  }
  if (fd_ < 0) error_ = std::exchange(fd_, -1);
}

FolderOfFile::~FolderOfFile() {
  if (fd_ >= 0) ::close(fd_);
}

int FolderOfFile::no_link() const { return fd_ == AT_FDCWD ? 0 : O_NOFOLLOW; }

// Makes the faults that every site can have: a delay and an errno. Returns true if the operation must return `result`
// without being executed.
bool fails_at(FaultSite site, const std::string& name, Fault& fault, ssize_t& result) {
  fault = fault_at(site, name);
  if (fault.action == FaultAction::kDelay) std::this_thread::sleep_for(std::chrono::milliseconds(fault.number));
  if (fault.action != FaultAction::kErrno) return false;
  result = -static_cast<ssize_t>(fault.number);
  return true;
}

UnsyncedFiles* unsynced() {
  FaultPlan* const plan = fault_plan();
  return plan == nullptr ? nullptr : plan->unsynced();
}

int remove(const FilePlace& file, int flags) {
  const FolderOfFile folder(file);
  return folder.error() != 0 ? folder.error() : negative_errno(::unlinkat(folder.fd(), folder.name(), flags));
}

// The system may return ENOTDIR for a link if a folder is wanted. This function then returns -ELOOP.
int with_link_named(const FilePlace& folder, int result) {
  return result == -ENOTDIR && folder.parts() > 0 && check_folder(folder) == -ELOOP ? -ELOOP : result;
}

// Returns how many of the `bytes` bytes the operation really transfers.
std::size_t moved_bytes(const Fault& fault, std::size_t bytes) {
  if (fault.action == FaultAction::kShort) return std::min(bytes, static_cast<std::size_t>(fault.number));
  if (fault.action == FaultAction::kTorn) return std::min(bytes, static_cast<std::size_t>(fault.number) * kSectorBytes);
  return bytes;
}

ssize_t claimed(const Fault& fault, ssize_t result, std::size_t bytes) {
  return fault.action == FaultAction::kTorn && result >= 0 ? static_cast<ssize_t>(bytes) : result;
}

}  // namespace

int open(const FilePlace& file, int flags, mode_t mode) {
  turn_size_signal_into_error();
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kOpen, file.path(), fault, result)) return static_cast<int>(result);
  const FolderOfFile folder(file);
  if (folder.error() != 0) return folder.error();
  return with_link_named(file, negative_errno(::openat(folder.fd(), folder.name(), flags | folder.no_link(), mode)));
}

int open_unnamed(const std::string& directory, const std::string& name, mode_t mode) {
  turn_size_signal_into_error();
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kOpen, name, fault, result)) return static_cast<int>(result);
  return negative_errno(::open(directory.c_str(), O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, mode));
}

int open_again(int fd, const std::string& name, int flags) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kOpen, name, fault, result)) return static_cast<int>(result);
  const std::string link = "/proc/self/fd/" + std::to_string(fd);
  return negative_errno(::open(link.c_str(), flags | O_CLOEXEC));
}

ssize_t pread(int fd, const std::string& name, void* data, std::size_t bytes, off_t offset) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kRead, name, fault, result)) return result;
  result = negative_errno(::pread(fd, data, moved_bytes(fault, bytes), offset));
  if (fault.action == FaultAction::kBitFlip && fault.number < result)
    static_cast<std::byte*>(data)[fault.number] ^= std::byte{1};
  return claimed(fault, result, bytes);
}

ssize_t pwrite(int fd, const std::string& name, const void* data, std::size_t bytes, off_t offset) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kWrite, name, fault, result)) return result;
  if (UnsyncedFiles* files = unsynced()) files->wrote(name);
  if (fault.action == FaultAction::kBitFlip && static_cast<std::size_t>(fault.number) < bytes) {
    const auto copy = AlignedMemory::make(bytes, "copy for a bit flip");
    if (!copy.ok()) return -ENOMEM;
    std::memcpy(copy->data(), data, bytes);
    copy->data()[fault.number] ^= std::byte{1};
    return negative_errno(::pwrite(fd, copy->data(), bytes, offset));
  }
  result = negative_errno(::pwrite(fd, data, moved_bytes(fault, bytes), offset));
  return claimed(fault, result, bytes);
}

int write_all(int fd, const std::string& name, std::span<const std::byte> bytes, off_t offset, std::size_t& done) {
  done = 0;
  for (int fruitless = 0; done < bytes.size();) {
    const ssize_t got = pwrite(fd, name, bytes.data() + done, bytes.size() - done, offset + static_cast<off_t>(done));
    if (got > 0) {
      done += static_cast<std::size_t>(got);
      fruitless = 0;
    } else if ((got != 0 && !is_worth_retrying(static_cast<int>(-got))) || ++fruitless > kMostRetries) {
      return got == 0 ? -EIO : static_cast<int>(got);
    }
  }
  return 0;
}

int reserve(int fd, const std::string& name, off_t bytes) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kReserve, name, fault, result)) return static_cast<int>(result);
  return negative_errno(::fallocate(fd, 0, 0, bytes));
}

int fsync(int fd, const std::string& name) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kFsync, name, fault, result)) return static_cast<int>(result);
  if (fault.action == FaultAction::kTorn) return 0;
  const int got = negative_errno(::fsync(fd));
  if (UnsyncedFiles* files = unsynced(); files != nullptr && got == 0) files->synced_file(name);
  return got;
}

int fsync_folder(int fd, const std::string& folder) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kFsync, folder, fault, result)) return static_cast<int>(result);
  if (fault.action == FaultAction::kTorn) return 0;
  const int got = negative_errno(::fsync(fd));
  if (UnsyncedFiles* files = unsynced(); files != nullptr && got == 0) files->synced_folder(folder);
  return got;
}

int sync_folder_of(const FilePlace& file, const char*& operation) {
  const FilePlace folder(folder_of_file(file.path()), std::max(file.parts() - 1, 0));
  operation = "open of the folder";
  const int fd = retried([&] { return open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (fd < 0) return fd;
  operation = "fsync of the folder";
  const int got = fsync_folder(fd, folder.path());
  ::close(fd);
  return got;
}

int rename(const FilePlace& from, const FilePlace& to) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kRename, to.path(), fault, result)) return static_cast<int>(result);
  // Two places in one folder need one descriptor: as many as the file needed when it was made.
  const bool is_one_folder =
      from.parts() == to.parts() && fs::path(from.path()).parent_path() == fs::path(to.path()).parent_path();
  const FolderOfFile old_folder(from);
  if (old_folder.error() != 0) return old_folder.error();
  const std::optional<FolderOfFile> other =
      is_one_folder ? std::nullopt : std::optional<FolderOfFile>(std::in_place, to);
  const int new_folder = other ? other->fd() : old_folder.fd();
  if (other && other->error() != 0) return other->error();
  UnsyncedFiles* const files = unsynced();
  if (files != nullptr) files->before_rename(from.path(), to.path());
  const int got =
      negative_errno(::renameat(old_folder.fd(), old_folder.name(), new_folder, name_in_folder(to).c_str()));
  if (files != nullptr && got == 0) files->renamed(from.path(), to.path());
  return got;
}

int unlink(const FilePlace& file) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kUnlink, file.path(), fault, result)) return static_cast<int>(result);
  const int got = remove(file, 0);
  if (UnsyncedFiles* files = unsynced(); files != nullptr && got == 0) files->unlinked(file.path());
  return got;
}

int unlink_surely(const FilePlace& file) { return remove(file, 0); }

int make_folder(const FilePlace& folder, mode_t mode) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kMkdir, folder.path(), fault, result)) return static_cast<int>(result);
  const FolderOfFile above(folder);
  return above.error() != 0 ? above.error() : negative_errno(::mkdirat(above.fd(), above.name(), mode));
}

int remove_folder(const FilePlace& folder) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kUnlink, folder.path(), fault, result)) return static_cast<int>(result);
  return with_link_named(folder, remove(folder, AT_REMOVEDIR));
}

int list_folder(const FilePlace& folder, std::vector<std::string>& names) {
  const FolderOfFile above(folder);
  if (above.error() != 0) return above.error();
  const int fd =
      negative_errno(::openat(above.fd(), above.name(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | above.no_link()));
  if (fd < 0) return with_link_named(folder, fd);
  DIR* const entries = ::fdopendir(fd);
  if (entries == nullptr) {
    const int error = -errno;
    ::close(fd);
    return error;
  }
  int error = 0;
  while (true) {
    errno = 0;  // calls in the loop may set errno
    const dirent* const entry = ::readdir(entries);
    error = -errno;
    if (entry == nullptr) break;
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  ::closedir(entries);
  return error;
}

int check_folder(const FilePlace& folder) {
  const FolderOfFile above(folder);
  if (above.error() != 0) return above.error();
  struct stat seen {};
  if (::fstatat(above.fd(), above.name(), &seen, AT_SYMLINK_NOFOLLOW) != 0) return -errno;
  return S_ISDIR(seen.st_mode) ? 0 : S_ISLNK(seen.st_mode) ? -ELOOP : -ENOTDIR;
}

}  // namespace file_calls
}  // namespace tessera
