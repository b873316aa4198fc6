#include "workshop/bench/bench_table.h"

#include <cmath>

#include "runtime/base/bytes.h"
#include "runtime/base/text_table.h"
#include "workshop/bench/number_text.h"

namespace tessera::app {
namespace {

constexpr double kShort = 10e-6;  // seconds; a column below it is shown in nanoseconds

double number(const std::variant<std::string, double>& cell) {
  const double* value = std::get_if<double>(&cell);
  return value ? *value : std::nan("");
}

/// The form in which the cells of one column are shown.
struct Form {
  std::string title;
  double factor = 1;
  const char* format = "%.3g";
  bool bytes = false;

  std::string operator()(const std::variant<std::string, double>& cell) const {
    if (const auto* text = std::get_if<std::string>(&cell)) return *text;
    const double value = number(cell);
    if (std::isnan(value)) return "-";
    return bytes ? format_bytes(std::llround(value)) : number_text(value * factor, format);
  }
};

Form form_of(const BenchTable& table, std::size_t column) {
  const std::string& name = table.columns[column];
  if (name.ends_with("_bytes")) return {name.substr(0, name.size() - 6), 1, "", true};
  if (name.ends_with("_fraction")) return {name.substr(0, name.size() - 9) + " %", 100, "%.1f"};
  if (!name.ends_with("_s") || name.ends_with("_per_s")) return {name};
  double largest = 0;
  for (const auto& row : table.rows) largest = std::fmax(largest, std::abs(number(row[column])));
  const std::string quantity = name.substr(0, name.size() - 2);
  return largest < kShort ? Form{quantity + " ns", 1e9, "%.0f"} : Form{quantity + " ms", 1e3, "%.3f"};
}

}  // namespace

nlohmann::json to_json(const BenchTable& table) {
  nlohmann::json rows = nlohmann::json::array();
  for (const auto& row : table.rows) {
    nlohmann::json cells = nlohmann::json::array();
    // NaN is written as null, which means "no value" in JSON.
    for (const auto& cell : row) std::visit([&](const auto& value) { cells.push_back(value); }, cell);
    rows.push_back(std::move(cells));
  }
  return {{"columns", table.columns}, {"rows", std::move(rows)}};
}

std::string to_text(const BenchTable& table) {
  std::vector<Form> forms;
  std::vector<TextTable::Column> columns;
  for (std::size_t i = 0; i < table.columns.size(); ++i) {
    forms.push_back(form_of(table, i));
    columns.push_back({forms[i].title, i == 0 ? TextTable::Align::kLeft : TextTable::Align::kRight});
  }
  TextTable text(std::move(columns));
  for (const auto& row : table.rows) {
    std::vector<std::string> cells;
    for (std::size_t i = 0; i < row.size(); ++i) cells.push_back(forms[i](row[i]));
    text.add_row(std::move(cells));
  }
  return text.to_string();
}

}  // namespace tessera::app
