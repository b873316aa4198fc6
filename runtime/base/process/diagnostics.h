#pragma once

#include <absl/status/status.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// Collects everything that is wrong with a text file and reports it in one status, sorted by position:
///
///     strategy.json:3:19: /optimizer/lr: must be a number from 0 to 1000, got -1
///     strategy.json:7:3: /optimiser: unknown key. hint: did you mean "optimizer"?
///
/// Lines and columns count from 1, columns in characters. The text must outlive the object.
class Diagnostics {
 public:
  static constexpr std::size_t kNowhere = static_cast<std::size_t>(-1);
  static constexpr std::size_t kMaxReported = 100;  ///< a message has at most this many errors, and counts the rest

  /// `name` is the name of the file in messages.
  Diagnostics(std::string name, std::string_view text);

  /// `offset` is in bytes from the start of the text; `pointer` is a JSON pointer (RFC 6901), and "" is the whole file.
  /// A `related` offset is appended to the message as line:column.
  void add(std::size_t offset, std::string pointer, std::string message, std::size_t related = kNowhere);

  bool empty() const { return problems_.empty(); }
  /// Returns whether there is a problem at this pointer, inside its value, or at an object or list that contains this
  /// pointer.
  bool touches(std::string_view pointer) const;
  /// Returns OK, or all problems, one per line, with exit code 78. `hint` is a "hint: ..." about files of this kind. It
  /// becomes the last line if no problem has its own hint.
  absl::Status to_status(const std::string& hint = "") const;

 private:
  struct Problem {
    std::size_t offset;
    std::string pointer;
    std::string message;
    std::size_t related;
  };
  std::string line_of(const Problem& problem) const;
  std::string line_and_column(std::size_t offset) const;

  std::string name_;
  std::string_view text_;
  std::vector<std::size_t> line_starts_;
  std::vector<Problem> problems_;
};

}  // namespace tessera
