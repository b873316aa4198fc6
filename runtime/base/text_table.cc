#include "runtime/base/text_table.h"

#include <algorithm>
#include <stdexcept>

#include "runtime/base/text.h"

namespace tessera {
namespace {

constexpr char kGap[] = "  ";

std::string padded(const std::string& cell, std::size_t width, TextTable::Align align) {
  const std::string blanks(width - std::min(width, text_width(cell)), ' ');
  return align == TextTable::Align::kRight ? blanks + cell : cell + blanks;
}

void append_line(std::string& text, std::string line) {
  line.erase(line.find_last_not_of(' ') + 1);
  text += line + '\n';
}

}  // namespace

TextTable::TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {
  if (columns_.empty()) throw std::invalid_argument("TextTable: a table needs at least one column");
}

void TextTable::add_row(std::vector<std::string> cells) {
  if (cells.size() > columns_.size()) {
    throw std::invalid_argument("TextTable: row of " + std::to_string(cells.size()) + " cells in a table of " +
                                std::to_string(columns_.size()) + " columns");
  }
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

void TextTable::add_rule() { rows_.emplace_back(); }

std::vector<std::size_t> TextTable::widths() const {
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) widths.push_back(text_width(column.title));
  for (const auto& row : rows_) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], text_width(row[i]));
  }
  return widths;
}

std::string TextTable::to_string(int indent) const {
  const std::vector<std::size_t> width = widths();
  const auto line_of = [&](auto&& cell_at) {
    std::string line(static_cast<std::size_t>(std::max(indent, 0)), ' ');
    for (std::size_t i = 0; i < columns_.size(); ++i) {
      line += (i == 0 ? "" : kGap) + padded(cell_at(i), width[i], columns_[i].align);
    }
    return line;
  };
  const auto rule = [&](std::size_t i) { return std::string(width[i], '-'); };

  std::string text;
  append_line(text, line_of([&](std::size_t i) { return columns_[i].title; }));
  append_line(text, line_of(rule));
  for (const auto& row : rows_) {
    append_line(text, row.empty() ? line_of(rule) : line_of([&](std::size_t i) { return row[i]; }));
  }
  return text;
}

}  // namespace tessera
