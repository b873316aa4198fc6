#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "runtime/base/metrics/metrics_form.h"
#include "tessera/metric.h"

namespace tessera {

/// What a metrics file looks like (metrics_form.h).
enum class MetricsFormat {
  kJsonLines,  ///< an object a line
  kCsv,        ///< a table
  kEvents,     ///< an event file of TensorBoard
};
/// By the name: ".csv" is a table, all else are lines of JSON.
MetricsFormat metrics_format_of(const std::filesystem::path& path);

/// Appends to a file of metrics. Lines of JSON have one object each, in the order given:
///
///     {"step":12,"loss":2.25,"grad_norm":1.5,"overflow":false}
///
/// Invariants:
///  1. What one call writes is handed to the system at once, in one write. So after a crash the file holds all that was
///     written, and lines of several processes that append to one file do not mix.
///  2. A line of JSON that a crash or a full disk cut short is ended before the next one begins, so it spoils no other
///     line. In the other formats what was cut short is cut off.
///  3. NaN and infinities are written as null, since JSON has no word for them. The key stays, so that a plot shows a
///     gap. Doubles are written so that they read back to the same bits. Invalid UTF-8 is replaced by U+FFFD.
///
/// Not thread-safe. Move-only; the destructor closes.
class MetricsWriter {
 public:
  /// What becomes of a file that is there already.
  enum class Start {
    kAppend,   ///< lines go behind its own
    kReplace,  ///< it is removed first
    kNew,      ///< an error (73)
  };
  struct Options {
    Start start = Start::kAppend;
    MetricsFormat format = MetricsFormat::kJsonLines;
    std::vector<std::string> columns = {};  ///< of a table (csv_form)
  };
  /// An event file is always a new one; under kAppend its run goes on with that of the files beside it. Errors name path
  /// and errno: exit code 73 (cannot be created, or its columns are others), 77 (permission), 74 (what it begins with was
  /// not written).
  static absl::StatusOr<MetricsWriter> open(const std::filesystem::path& path, const Options& options);
  static absl::StatusOr<MetricsWriter> open(const std::filesystem::path& path, Start start = Start::kAppend);
  ~MetricsWriter();
  MetricsWriter(MetricsWriter&& other) noexcept;
  MetricsWriter& operator=(MetricsWriter&& other) noexcept;

  /// Errors: 74 with errno (such as a full disk); the writer stays usable. 70 for an empty name or one given
  /// twice, and for one that a table has no column of.
  absl::Status write(const std::vector<Metric>& metrics);
  /// Closes the file, and says if the system could not keep what was written (74). Later writes fail.
  absl::Status close();

 private:
  MetricsWriter(int fd, std::filesystem::path path, std::unique_ptr<MetricsForm> form);
  absl::Status go_on_with_content();
  absl::Status write_all(const std::string& bytes);

  int fd_ = -1;
  std::filesystem::path path_;
  std::unique_ptr<MetricsForm> form_;
  bool torn_ = false;   ///< the file ends in half a line of JSON
  bool begun_ = false;  ///< it has what stands before all else
};

/// The last `window` step times, for medians and tails. Not thread-safe.
class StepTimes {
 public:
  /// REQUIRES: window >= 1 (a smaller one counts as 1).
  explicit StepTimes(std::size_t window = 100) : window_(window < 1 ? 1 : window) {}

  void add(double seconds);
  std::size_t count() const { return seconds_.size(); }  ///< at most `window`
  double p50() const { return percentile(50); }
  double p95() const { return percentile(95); }
  /// The smallest time that at least `percent` % of the window does not exceed (nearest rank): always a time
  /// that was measured. NaN if nothing was added. REQUIRES: 0 < percent <= 100.
  double percentile(double percent) const;

 private:
  std::size_t window_;
  std::size_t next_ = 0;  ///< once the window is full: the oldest entry
  std::vector<double> seconds_;
};

}  // namespace tessera
