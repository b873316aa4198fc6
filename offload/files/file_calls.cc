#include "offload/files/file_calls.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <thread>

#include "offload/files/aligned_memory.h"
#include "offload/files/fault_plan.h"
#include "offload/files/retries.h"
#include "offload/files/sector.h"
#include "offload/files/unsynced_files.h"
#include "runtime/base/process/process_limits.h"

namespace tessera::file_calls {
namespace {

template <typename Result>
Result negative_errno(Result result) {
  return result < 0 ? static_cast<Result>(-errno) : result;
}

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

int open(const std::string& name, int flags, mode_t mode) {
  turn_size_signal_into_error();
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kOpen, name, fault, result)) return static_cast<int>(result);
  return negative_errno(::open(name.c_str(), flags, mode));
}

int open_below(const std::string& folder, const std::filesystem::path& parts, int flags, mode_t mode) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kOpen, folder + "/" + parts.string(), fault, result)) return static_cast<int>(result);
  // The path is opened part by part, each part from the previous one, so that the part that is checked is the part that
  // is opened. A single call of openat2 could do this, but containers forbid it.
  int at = negative_errno(::open(folder.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  for (auto part = parts.begin(); at >= 0 && part != parts.end(); ++part) {
    const bool is_last = std::next(part) == parts.end();
    int next = negative_errno(
        ::openat(at, part->c_str(), is_last ? flags | O_NOFOLLOW : O_PATH | O_NOFOLLOW | O_CLOEXEC, mode));
    ::close(at);
    struct stat seen {};
    if (next >= 0 && !is_last && (::fstat(next, &seen) != 0 || !S_ISDIR(seen.st_mode))) {
      ::close(next);
      next = S_ISLNK(seen.st_mode) ? -ELOOP : -ENOTDIR;
    }
    at = next;
  }
  return at;
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

int sync_folder(const std::string& folder, const char*& operation) {
  operation = "open of the folder";
  const int fd = retried([&] { return open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0); });
  if (fd < 0) return fd;
  operation = "fsync of the folder";
  const int got = fsync_folder(fd, folder);
  ::close(fd);
  return got;
}

int rename(const std::string& from, const std::string& to) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kRename, to, fault, result)) return static_cast<int>(result);
  UnsyncedFiles* const files = unsynced();
  if (files != nullptr) files->before_rename(from, to);
  const int got = negative_errno(std::rename(from.c_str(), to.c_str()));
  if (files != nullptr && got == 0) files->renamed(from, to);
  return got;
}

int unlink(const std::string& name) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kUnlink, name, fault, result)) return static_cast<int>(result);
  const int got = negative_errno(::unlink(name.c_str()));
  if (UnsyncedFiles* files = unsynced(); files != nullptr && got == 0) files->unlinked(name);
  return got;
}

int make_folder(const std::string& name, mode_t mode) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kMkdir, name, fault, result)) return static_cast<int>(result);
  return negative_errno(::mkdir(name.c_str(), mode));
}

int remove_folder(const std::string& name) {
  Fault fault;
  ssize_t result = 0;
  if (fails_at(FaultSite::kUnlink, name, fault, result)) return static_cast<int>(result);
  return negative_errno(::rmdir(name.c_str()));
}

}  // namespace tessera::file_calls
