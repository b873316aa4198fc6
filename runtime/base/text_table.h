#pragma once

// See docs/glossary.md: unit.

#include <string>
#include <utility>
#include <vector>

namespace tessera {

/// A plain-text table with aligned columns, such as the plan that Tessera prints:
///
///     category        per rank      share
///     --------------  ----------  -------
///     parameters      112.00 MiB   25.0 %
///     master weights  336.00 MiB   75.0 %
///
/// Widths are counted in characters, so units such as "µs" line up. Lines have no trailing blanks.
class TextTable {
 public:
  enum class Align { kLeft, kRight };  ///< kLeft is for words, kRight is for numbers
  struct Column {
    std::string title;
    Align align = Align::kLeft;
  };

  explicit TextTable(std::vector<Column> columns);

  /// Adds a row of cells, from left to right. Missing cells are empty. REQUIRES: no more cells than columns
  /// (`std::invalid_argument`).
  void add_row(std::vector<std::string> cells);
  /// Adds a line of dashes, for example above a row of sums.
  void add_rule();

  /// Returns the table as text. Each line ends in a newline and begins with `indent` blanks.
  std::string to_string(int indent = 0) const;

 private:
  std::vector<std::size_t> widths() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;  ///< an empty row is printed as a line of dashes
};

/// These functions return columns of a table: left_column returns a column of words, and right_column returns a column
/// of numbers.
inline TextTable::Column left_column(std::string title) { return {std::move(title), TextTable::Align::kLeft}; }
inline TextTable::Column right_column(std::string title) { return {std::move(title), TextTable::Align::kRight}; }

}  // namespace tessera
