#pragma once

// See docs/glossary.md: unit.

#include <nlohmann/json.hpp>
#include <string>
#include <variant>
#include <vector>

namespace tessera::app {

/// The measurements of a section of `tessera bench`, one row for each. A column's name ends in its unit: `_s`,
/// `_bytes`, `_fraction`; other numbers have no unit. A row has a cell for every column; NaN is a cell without a value.
struct BenchTable {
  std::vector<std::string> columns;
  std::vector<std::vector<std::variant<std::string, double>>> rows;
};

/// Returns {"columns": [name, ...], "rows": [[text, number or null, ...], ...]}
nlohmann::json to_json(const BenchTable& table);
/// Shows times in ms, or in ns if a column's largest time is below 10 us. Shows bytes in KiB, MiB, ...
std::string to_text(const BenchTable& table);

}  // namespace tessera::app
