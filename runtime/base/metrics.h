#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <variant>
#include <vector>

namespace tessera {

/// One named number, word or flag of a metrics line. Counts are int64, measurements double.
struct Metric {
  std::string name;
  std::variant<std::int64_t, double, bool, std::string> value;
};

/// Appends to a file of JSON lines, one object a line, in the order given:
///
///     {"step":12,"loss":2.25,"grad_norm":1.5,"overflow":false}
///
/// Invariants:
///  1. A line is handed to the system at once, in one write. So after a crash the file holds every line that was
///     written, and lines of several processes that append to one file do not mix.
///  2. A line that a crash or a full disk cut short is ended before the next one begins, so it spoils no other line.
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
  /// Errors name path and errno: exit code 73 (cannot be created), 77 (permission).
  static absl::StatusOr<MetricsWriter> open(const std::filesystem::path& path, Start start = Start::kAppend);
  ~MetricsWriter();
  MetricsWriter(MetricsWriter&& other) noexcept;
  MetricsWriter& operator=(MetricsWriter&& other) noexcept;

  /// Errors: 74 with errno (such as a full disk); the writer stays usable. 70 for an empty name or one given
  /// twice.
  absl::Status write(const std::vector<Metric>& metrics);
  /// Closes the file, and says if the system could not keep what was written (74). Later writes fail.
  absl::Status close();

 private:
  MetricsWriter(int fd, std::filesystem::path path, bool torn) : fd_(fd), path_(std::move(path)), torn_(torn) {}
  absl::Status write_all(const std::string& bytes);

  int fd_ = -1;
  std::filesystem::path path_;
  bool torn_ = false;  ///< the file ends in half a line
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
