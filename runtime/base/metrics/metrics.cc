#include "runtime/base/metrics/metrics.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "runtime/base/errno_hint.h"
#include "runtime/base/process/process_limits.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

absl::Status os_error(ExitCode code, const std::filesystem::path& path, const char* what, int error) {
  return make_error(code, fmt::format("metrics file {}: {}: {}", path.string(), what, reason_of_writing(error)));
}

// Keeps other writers out of the file while a line is written. Another writer would mistake a line that is half written
// for a line that a crash cut short. If a file cannot be locked (a pipe, some network file systems) writers are
// unguarded.
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

/// Returns the end of a regular file; nothing for pipes and terminals.
std::optional<off_t> end_of(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) return std::nullopt;
  return info.st_size;
}

/// Returns the end of the last whole line. REQUIRES: `end` is the file's end.
off_t end_of_whole_lines(int fd, off_t end) {
  for (char byte = 0; end > 0; --end) {
    if (::pread(fd, &byte, 1, end - 1) != 1 || byte == '\n') break;
  }
  return end;
}

/// Returns the first line, at most its first 64 KiB, without the line's end.
std::string first_line_of(int fd) {
  std::string line(std::size_t{1} << 16, '\0');
  const ssize_t got = ::pread(fd, line.data(), line.size(), 0);
  line.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
  return line.substr(0, line.find('\n'));
}

std::unique_ptr<MetricsForm> form_of(const MetricsWriter::Options& options) {
  switch (options.format) {
    case MetricsFormat::kCsv:
      return csv_form(options.columns);
    case MetricsFormat::kEvents:
      return event_form(options.start == MetricsWriter::Start::kAppend);
    case MetricsFormat::kJsonLines:
      break;
  }
  return json_lines_form();
}

int open_for(const std::filesystem::path& path, MetricsWriter::Start start) {
  using enum MetricsWriter::Start;
  if (start == kReplace) ::unlink(path.c_str());  // an error here also makes the next line fail
  if (start != kAppend) return ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
  // Reading is needed only for existing content. A device or file that may not be read is accepted too.
  const int fd = ::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
  return fd >= 0 || errno != EACCES ? fd : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CLOEXEC);
}

}  // namespace

MetricsFormat metrics_format_of(const std::filesystem::path& path) {
  return path.extension() == ".csv" ? MetricsFormat::kCsv : MetricsFormat::kJsonLines;
}

MetricsWriter::MetricsWriter(int fd, std::filesystem::path path, std::unique_ptr<MetricsForm> form)
    : fd_(fd), path_(std::move(path)), form_(std::move(form)) {}

absl::StatusOr<MetricsWriter> MetricsWriter::open(const std::filesystem::path& path, Start start) {
  return open(path, Options{start});
}

absl::StatusOr<MetricsWriter> MetricsWriter::open(const std::filesystem::path& path, const Options& options) {
  turn_size_signal_into_error();
  const int fd = open_for(path, options.format == MetricsFormat::kEvents ? Start::kNew : options.start);
  if (fd < 0) {
    const int error = errno;
    return os_error(exit_code_of_creating(error), path, "cannot be opened", error);
  }
  MetricsWriter writer(fd, path, form_of(options));
  TESSERA_RETURN_IF_ERROR(writer.go_on_with_content());
  if (!writer.begun_ && !writer.form_->beginning().empty()) TESSERA_RETURN_IF_ERROR(writer.write_all(""));
  return writer;
}

/// Reads the existing content of a file to which metrics are appended.
absl::Status MetricsWriter::go_on_with_content() {
  const FileLock lock(fd_.get());
  const off_t end = end_of(fd_.get()).value_or(0);
  const off_t whole = end_of_whole_lines(fd_.get(), end);
  torn_ = whole < end && !form_->drops_halves();
  if (whole < end && form_->drops_halves() && ::ftruncate(fd_.get(), whole) != 0) {
    return os_error(ExitCode::kCannotCreate, path_, "half a line at its end cannot be cut off", errno);
  }
  begun_ = whole > 0;
  if (!begun_) return absl::OkStatus();
  const absl::Status status = form_->go_on_after(first_line_of(fd_.get()));
  return status.ok()
             ? status
             : make_error(exit_code_of(status), fmt::format("metrics file {}: {}", path_.string(), message_of(status)));
}

MetricsWriter::MetricsWriter(MetricsWriter&&) noexcept = default;
MetricsWriter& MetricsWriter::operator=(MetricsWriter&&) noexcept = default;
MetricsWriter::~MetricsWriter() = default;

absl::Status MetricsWriter::write(const std::vector<Metric>& metrics) {
  if (!form_) return make_error(ExitCode::kInternal, "a metrics file was written after it had been moved");
  std::set<std::string_view> names;
  for (const Metric& metric : metrics) {
    if (metric.name.empty() || !names.insert(metric.name).second) {
      return make_error(ExitCode::kUsage,
                        fmt::format("metrics file {}: name {} is {}", path_.string(), quoted_text(metric.name),
                                    metric.name.empty()
                                        ? "empty. [T0421] hint: name each metric"
                                        : "given twice in one line. [T0422] hint: give each metric a name of its own"));
    }
  }
  const absl::StatusOr<std::string> bytes = form_->bytes_of(metrics);
  if (!bytes.ok()) {
    return make_error(exit_code_of(bytes.status()),
                      fmt::format("metrics file {}: {}", path_.string(), message_of(bytes.status())));
  }
  return write_all(*bytes);
}

absl::Status MetricsWriter::write_all(const std::string& given) {
  const FileLock lock(fd_.get());
  const std::optional<off_t> end = end_of(fd_.get());
  const std::string bytes = (torn_ ? "\n" : "") + (begun_ ? "" : form_->beginning()) + given;
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t wrote = ::write(fd_.get(), bytes.data() + done, bytes.size() - done);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote <= 0) {
      const int error = wrote < 0 ? errno : EIO;
      const bool cut_off = form_->drops_halves() && end && ::ftruncate(fd_.get(), *end) == 0;
      if (done > 0 && !cut_off) torn_ = bytes[done - 1] != '\n';
      return os_error(ExitCode::kIo, path_, "a line was not written", error);
    }
    done += static_cast<std::size_t>(wrote);
  }
  torn_ = false;
  begun_ = true;
  return absl::OkStatus();
}

absl::Status MetricsWriter::close() {
  const int fd = fd_.release();
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
