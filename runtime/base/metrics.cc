#include "runtime/base/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

absl::Status os_error(ExitCode code, const std::filesystem::path& path, const char* what, int error) {
  return make_error(code, fmt::format("metrics file {}: {}: {} (errno {})", path.string(), what,
                                      std::generic_category().message(error), error));
}

// Keeps other writers of the file out, so that nobody takes a line that is being written for one that was torn. Where a
// file cannot be locked (a pipe, some network file systems) writers go unguarded.
class FileLock {
 public:
  explicit FileLock(int fd) : fd_(fd), held_(::flock(fd, LOCK_EX) == 0) {}
  ~FileLock() {
    if (held_) ::flock(fd_, LOCK_UN);
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  int fd_;
  bool held_;
};

// Pipes and terminals have no end to look at: only a regular file can hold half a line.
bool ends_in_half_a_line(int fd) {
  const FileLock lock(fd);
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || info.st_size == 0) return false;
  char last = '\n';
  return ::pread(fd, &last, 1, info.st_size - 1) == 1 && last != '\n';
}

int open_for(const std::filesystem::path& path, MetricsWriter::Start start) {
  using enum MetricsWriter::Start;
  if (start == kReplace) ::unlink(path.c_str());  // what keeps it from going, keeps the next line from working too
  if (start != kAppend) return ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  // Reading is wanted only to look at the last byte; a device or file that may not be read will do as well.
  const int fd = ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  return fd >= 0 || errno != EACCES ? fd : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
}

}  // namespace

absl::StatusOr<MetricsWriter> MetricsWriter::open(const std::filesystem::path& path, Start start) {
  const int fd = open_for(path, start);
  if (fd < 0) {
    const int error = errno;
    const bool denied = error == EACCES || error == EPERM || error == EROFS;
    return os_error(denied ? ExitCode::kPermission : ExitCode::kCannotCreate, path, "cannot be opened", error);
  }
  return MetricsWriter(fd, path, ends_in_half_a_line(fd));
}

MetricsWriter::MetricsWriter(MetricsWriter&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), path_(std::move(other.path_)), torn_(other.torn_) {}

MetricsWriter& MetricsWriter::operator=(MetricsWriter&& other) noexcept {
  std::swap(fd_, other.fd_);
  std::swap(path_, other.path_);
  std::swap(torn_, other.torn_);
  return *this;
}

MetricsWriter::~MetricsWriter() {
  if (fd_ >= 0) ::close(fd_);
}

absl::Status MetricsWriter::write(const std::vector<Metric>& metrics) {
  nlohmann::ordered_json line = nlohmann::ordered_json::object();
  for (const Metric& metric : metrics) {
    if (metric.name.empty() || line.contains(metric.name)) {
      return make_error(ExitCode::kInternal,
                        fmt::format("metrics file {}: name {} is {}", path_.string(), quoted_text(metric.name),
                                    metric.name.empty() ? "empty" : "given twice in one line"));
    }
    std::visit([&](const auto& value) { line[metric.name] = value; }, metric.value);
  }
  // dump() itself writes non-finite numbers as null.
  const std::string text = line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
  return write_all((torn_ ? "\n" : "") + text + "\n");
}

absl::Status MetricsWriter::write_all(const std::string& bytes) {
  const FileLock lock(fd_);
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = ::write(fd_, bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      const int error = wrote < 0 ? errno : EIO;
      if (done > 0) torn_ = bytes[done - 1] != '\n';
      return os_error(ExitCode::kIo, path_, "a line was not written", error);
    }
    done += static_cast<std::size_t>(wrote);
  }
  torn_ = false;
  return absl::OkStatus();
}

absl::Status MetricsWriter::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0 && ::close(fd) != 0) return os_error(ExitCode::kIo, path_, "cannot be closed", errno);
  return absl::OkStatus();
}

void StepTimes::add(double seconds) {
  if (seconds_.size() < window_) {
    seconds_.push_back(seconds);
    return;
  }
  seconds_[next_] = seconds;
  next_ = (next_ + 1) % window_;
}

double StepTimes::percentile(double percent) const {
  if (seconds_.empty()) return std::numeric_limits<double>::quiet_NaN();
  std::vector<double> times = seconds_;
  const double rank = std::ceil(percent / 100.0 * static_cast<double>(times.size()));
  const auto index = static_cast<std::size_t>(std::clamp(rank, 1.0, static_cast<double>(times.size()))) - 1;
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(index), times.end());
  return times[index];
}

}  // namespace tessera
