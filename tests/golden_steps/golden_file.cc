#include "tests/golden_steps/golden_file.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <utility>

namespace tessera::testing {
namespace {

std::string joined(const GoldenFile::Lines& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

GoldenFile::Lines without(const GoldenFile::Lines& lines, const GoldenFile::Lines& others) {
  GoldenFile::Lines rest = lines;
  std::erase_if(rest, [&](const std::string& line) { return std::ranges::find(others, line) != others.end(); });
  return rest;
}

/// Returns the lines that only one side has, with "-" before stored lines and "+" before present lines. A stored line
/// is followed by the present lines of the same name; present lines without such a stored line are at the end.
std::string difference(const GoldenFile::Lines& stored, const GoldenFile::Lines& now) {
  const GoldenFile::Lines gone = without(stored, now);
  GoldenFile::Lines come = without(now, stored);
  if (gone.empty() && come.empty()) return "the same lines come in another order, or another number of times\n";
  std::string text;
  for (const std::string& line : gone) {
    text += "-" + line + "\n";
    const auto same = std::ranges::stable_partition(
        come, [&](const std::string& other) { return !other.starts_with(line.substr(0, line.find(':') + 1)); });
    for (const std::string& other : same) text += "+" + other + "\n";
    come.erase(same.begin(), same.end());
  }
  for (const std::string& line : come) text += "+" + line + "\n";
  return text;
}

}  // namespace

GoldenFile::GoldenFile(std::filesystem::path path, std::vector<std::string> comments, std::vector<std::string> names)
    : path_(std::move(path)), comments_(std::move(comments)), names_(std::move(names)) {
  std::ifstream file(path_);
  is_there_ = file.is_open();
  std::string line;
  while (std::getline(file, line)) {
    if (line.empty() || line.front() == '#') continue;
    if (line.front() == '[' && line.back() == ']') {
      found_.push_back(line.substr(1, line.size() - 2));
      sections_[found_.back()];
    } else if (!found_.empty()) {
      sections_[found_.back()].push_back(line);
    }
  }
}

bool GoldenFile::is_written_anew() { return std::getenv("TESSERA_WRITE_GOLDEN") != nullptr; }

void GoldenFile::expect(const std::string& name, const Lines& lines) {
  if (is_written_anew()) {
    sections_[name] = lines;
    return;
  }
  const auto stored = sections_.find(name);
  ASSERT_NE(stored, sections_.end()) << path_ << " has no section [" << name << "]";
  if (stored->second == lines) return;
  ADD_FAILURE() << "[" << name << "] is not what " << path_.string() << " has: - stored, + now\n"
                << difference(stored->second, lines);
}

void GoldenFile::expect_no_other_sections() const {
  if (!is_written_anew()) {
    EXPECT_EQ(found_, names_) << path_;
  }
}

void GoldenFile::write() const {
  if (!is_written_anew()) return;
  std::ofstream file(path_);
  for (const std::string& comment : comments_) file << "# " << comment << "\n";
  for (const std::string& name : names_) {
    const auto section = sections_.find(name);
    if (section != sections_.end()) file << "\n[" << name << "]\n" << joined(section->second);
  }
  ASSERT_TRUE(file.good()) << path_;
  std::cout << "written anew: " << path_.string() << std::endl;
}

Line& Line::add(const char* name, std::int64_t number) {
  return number == 0 ? *this : add_text(name, std::to_string(number));
}

Line& Line::add_seconds(const char* name, double seconds) {
  if (seconds == 0) return *this;
  char text[64];
  std::snprintf(text, sizeof text, "%.3f", seconds * 1e9);
  return add_text(name, text);
}

Line& Line::add_text(const char* name, const std::string& text) {
  text_ += std::string(is_empty_ ? ": " : ", ") + name + " " + text;
  is_empty_ = false;
  return *this;
}

void Line::to(GoldenFile::Lines& lines) const {
  if (!is_empty_) lines.push_back(text_);
}

}  // namespace tessera::testing
