#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/metrics/metrics_form.h"
#include "runtime/base/process/owned_fd.h"
#include "tessera/metric.h"

namespace tessera {

/// The form of a metrics file (metrics_form.h).
enum class MetricsFormat {
  kJsonLines,  ///< one object per line
  kCsv,        ///< a table
  kEvents,     ///< an event file of TensorBoard
};
/// Returns the format for a file's name: kCsv if it ends in ".csv", or else kJsonLines.
MetricsFormat metrics_format_of(const std::filesystem::path& path);

/// Appends metrics to a file. MetricsFile (tessera/metrics_file.h) and `tessera train` use it. A line of JSON has one
/// object, whose members are in the order of the metrics:
///
///     {"step":12,"loss":2.25,"grad_norm":1.5,"overflow":false}
///
///  1. Each call of `write` hands its bytes to the system at once, in one write. The file therefore holds all that was
///     written, even after a crash. Lines of several processes that append to one file do not mix.
///  2. A crash or a full disk may cut a line of JSON short. Such a line is ended before the next line begins, so it
///     spoils no other line. The other formats remove such an incomplete row.
///  3. NaN and infinities are written as null, since JSON cannot express them. The key stays, so that a plot shows a
///     gap. Doubles are written so that they read back to the same bits. Invalid UTF-8 is replaced by U+FFFD.
///
/// The class is not thread-safe. It is move-only; the destructor closes the file.
class MetricsWriter {
 public:
  /// The treatment of a file that already exists.
  enum class Start {
    kAppend,   ///< new lines follow after those of the existing file
    kReplace,  ///< the existing file is removed first
    kNew,      ///< an existing file is an error (73)
  };
  struct Options {
    Start start = Start::kAppend;
    MetricsFormat format = MetricsFormat::kJsonLines;
    std::vector<std::string> columns = {};  ///< columns of a table (csv_form)
  };
  /// Opens the file. An event file is always a new one. Under kAppend, the new event file continues the run of the
  /// event files in its folder. Errors name the path and the errno: exit code 73 if the file cannot be created or is
  /// another table (csv_form), 77 if permission is missing, 74 if its beginning could not be written.
  static absl::StatusOr<MetricsWriter> open(const std::filesystem::path& path, const Options& options);
  static absl::StatusOr<MetricsWriter> open(const std::filesystem::path& path, Start start = Start::kAppend);
  ~MetricsWriter();
  MetricsWriter(MetricsWriter&& other) noexcept;
  MetricsWriter& operator=(MetricsWriter&& other) noexcept;

  /// Appends one row. Errors: 74 with the errno if the write fails (such as on a full disk), and the writer stays
  /// usable; 64 if a name is empty, is given twice, or has no column in the table.
  absl::Status write(const std::vector<Metric>& metrics);
  /// Closes the file. Error: 74 if the system could not store the written bytes. Later writes fail.
  absl::Status close();

 private:
  MetricsWriter(int fd, std::filesystem::path path, std::unique_ptr<MetricsForm> form);
  absl::Status go_on_with_content();
  absl::Status write_all(const std::string& bytes);

  OwnedFd fd_;
  std::filesystem::path path_;
  std::unique_ptr<MetricsForm> form_;
  bool torn_ = false;   ///< the file ends in an incomplete line of JSON
  bool begun_ = false;  ///< whether the file has its beginning (header or first event)
};

/// The last `window` step times in seconds, for medians and tails. It is not thread-safe.
class StepTimes {
 public:
  /// REQUIRES: window >= 1 (a smaller one counts as 1).
  explicit StepTimes(std::size_t window = 100) : window_(window < 1 ? 1 : window) {}

  void add(double seconds);
  std::size_t count() const { return seconds_.size(); }  ///< never more than `window`
  double p50() const { return percentile(50); }
  double p95() const { return percentile(95); }
  /// Returns the smallest time that at least `percent` % of the times in the window do not exceed (nearest rank). It is
  /// always a time that was measured. It is NaN if nothing was added. REQUIRES: 0 < percent <= 100.
  double percentile(double percent) const;

 private:
  std::size_t window_;
  std::size_t next_ = 0;  ///< index of the oldest entry after the window is full
  std::vector<double> seconds_;
};

}  // namespace tessera
