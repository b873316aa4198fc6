#pragma once

#include <cstddef>
#include <deque>
#include <string>
#include <string_view>

namespace tessera {

/// Takes one rank's output when it arrives, and writes it to `fd` in whole lines. Each line has a prefix and is written
/// at once, so that ranks never break one another's lines. The object keeps the last lines for the report.
///
/// A line longer than 64 KiB is written in parts of that length. A carriage return (a progress bar) ends no line. Lines
/// are dropped if `fd` takes no more: a broken log does not end the job. `error` then gives the reason.
class LineForwarder {
 public:
  LineForwarder(int fd, std::string prefix) : fd_(fd), prefix_(std::move(prefix)) {}

  /// Takes the next bytes, and writes the lines that they complete.
  void add(std::string_view bytes);
  /// Writes the rest, which does not end with a line end.
  void finish();

  const std::deque<std::string>& last_lines() const { return last_lines_; }
  /// Returns the reason for which lines were dropped, as an errno. It is 0 if none were dropped, or if the pipe was
  /// closed.
  int error() const { return error_; }

 private:
  void take_line(std::string_view line);

  static constexpr std::size_t kLongestLine = 64 << 10;
  static constexpr std::size_t kKeptLines = 20;
  static constexpr std::size_t kKeptBytesPerLine = 2000;

  int fd_;
  std::string prefix_;
  std::string partial_;   ///< the last line, which has no end yet
  std::string prefixed_;  ///< whole lines to write
  std::deque<std::string> last_lines_;
  int error_ = 0;
};

/// Writes all of `text`, and waits if the reader is slow. Returns 0, or the errno of the failure.
int write_all(int fd, std::string_view text);

}  // namespace tessera
