#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/base/metrics/metrics_form.h"
#include "runtime/base/status.h"
#include "runtime/base/text.h"

namespace tessera {
namespace {

std::string csv_cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) quoted += c == '"' ? std::string("\"\"") : std::string(1, c);
  return quoted + "\"";
}

std::string csv_line(const std::vector<std::string>& cells) {
  std::string line;
  for (std::size_t i = 0; i < cells.size(); ++i) line += (i > 0 ? "," : "") + csv_cell(cells[i]);
  return line + "\n";
}

/// Returns the shortest text that reads back to the same bits.
std::string csv_text(const Metric& metric) {
  if (const auto* text = std::get_if<std::string>(&metric.value)) return *text;
  if (const auto* number = std::get_if<double>(&metric.value))
    return std::isnan(*number) ? "nan" : fmt::to_string(*number);
  if (const auto* count = std::get_if<std::int64_t>(&metric.value)) return fmt::to_string(*count);
  return std::get<bool>(metric.value) ? "true" : "false";
}

class Csv final : public MetricsForm {
 public:
  explicit Csv(std::vector<std::string> columns) : columns_(std::move(columns)) {}

  absl::Status go_on_after(std::string_view first_line) override {
    std::vector<std::string> there = cells_of(first_line);
    left_out_ = names_without(columns_, there);
    if (!columns_.empty() && !left_out_.empty() && !names_without(there, columns_).empty()) {
      return make_error(ExitCode::kCannotCreate, "its columns are " + joined(there) + ", and those of this run " +
                                                     joined(columns_) + ". [T0423] hint: give the table another name");
    }
    columns_ = std::move(there);
    return absl::OkStatus();
  }

  std::string beginning() const override { return columns_.empty() ? "" : csv_line(columns_); }

  absl::StatusOr<std::string> bytes_of(const std::vector<Metric>& metrics) override {
    if (columns_.empty()) {
      for (const Metric& metric : metrics) columns_.push_back(metric.name);
    }
    std::vector<std::string> row(columns_.size());
    for (const Metric& metric : metrics) {
      const auto column = std::find(columns_.begin(), columns_.end(), metric.name);
      if (column == columns_.end()) {
        if (has(left_out_, metric.name)) continue;
        return make_error(ExitCode::kUsage, "the table has no column " + quoted_text(metric.name) +
                                                ". [T0424] hint: write all names in the first row; columns are " +
                                                joined(columns_));
      }
      row[static_cast<std::size_t>(column - columns_.begin())] = csv_text(metric);
    }
    return csv_line(row);
  }

 private:
  static bool has(const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  }
  /// Returns `names` without those that `others` has too.
  static std::vector<std::string> names_without(std::vector<std::string> names,
                                                const std::vector<std::string>& others) {
    std::erase_if(names, [&](const std::string& name) { return has(others, name); });
    return names;
  }
  static std::vector<std::string> cells_of(std::string_view line) {
    std::vector<std::string> cells(1);
    bool is_quoted = false;
    for (std::size_t i = 0; i < line.size(); ++i) {
      const bool is_double = is_quoted && line[i] == '"' && i + 1 < line.size() && line[i + 1] == '"';
      if (is_double)
        cells.back() += line[++i];
      else if (line[i] == '"')
        is_quoted = !is_quoted;
      else if (line[i] == ',' && !is_quoted)
        cells.emplace_back();
      else
        cells.back() += line[i];
    }
    return cells;
  }

  std::vector<std::string> columns_;
  std::vector<std::string> left_out_;  ///< columns that were given, but are not in the existing table
};

}  // namespace

std::unique_ptr<MetricsForm> csv_form(std::vector<std::string> columns) {
  return std::make_unique<Csv>(std::move(columns));
}

}  // namespace tessera
