#pragma once

#include <string>
#include <vector>

namespace tessera {

/// A plain-text table with aligned columns, such as the plan prints:
///
///     category        per rank      share
///     --------------  ----------  -------
///     parameters      112.00 MiB   25.0 %
///     master weights  336.00 MiB   75.0 %
///
/// Widths are counted in characters, so units such as "µs" line up. Lines carry no trailing blanks.
class TextTable {
 public:
  enum class Align { kLeft, kRight };  ///< words to the left, numbers to the right
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit TextTable(std::vector<Column> columns);

  /// Cells from left to right. Missing ones are empty. REQUIRES: no more cells than columns
  /// (`std::invalid_argument`).
  void add_row(std::vector<std::string> cells);
  /// A line of dashes, such as above a row of sums.
  void add_rule();

  /// Each line ends in a newline and begins with `indent` blanks.
  std::string to_string(int indent = 0) const;

 private:
  std::vector<std::size_t> widths() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  ///< an empty row is a rule
};

}  // namespace tessera
