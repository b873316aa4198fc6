#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace tessera::testing {

/// The results that a test stored once and must reach again: a text file with a section for each configuration.
///
///     # Comments say what is stored.
///     [01 FULL_SHARD adamw, 2 in memory]
///     what: number 1, other number 2
///
/// If the environment variable TESSERA_WRITE_GOLDEN is set, nothing is compared: the new results replace the stored
/// ones. A run of only some configurations (--gtest_filter) leaves the other sections as they are.
class GoldenFile {
 public:
  using Lines = std::vector<std::string>;

  /// `names`: the names of all sections, in the order of the file.
  GoldenFile(std::filesystem::path path, std::vector<std::string> comments, std::vector<std::string> names);

  static bool is_written_anew();
  bool is_there() const { return is_there_; }
  const std::filesystem::path& path() const { return path_; }

  /// Fails the test if the section is missing or has other lines.
  void expect(const std::string& name, const Lines& lines);
  /// Fails the test if the file has sections of other names, or in another order.
  void expect_no_other_sections() const;
  /// Writes the file if TESSERA_WRITE_GOLDEN is set.
  void write() const;

 private:
  const std::filesystem::path path_;
  const std::vector<std::string> comments_, names_;
  bool is_there_ = false;
  std::vector<std::string> found_;         ///< names of sections in the order of the file
  std::map<std::string, Lines> sections_;  ///< [name of a section]: its lines
};

/// A line of numbers: "what: name 1, other name 2". Numbers that are 0 are left out, so that a new kind of number does
/// not change the lines in which it is 0.
class Line {
 public:
  explicit Line(std::string what) : text_(std::move(what)) {}
  Line& add(const char* name, std::int64_t number);
  /// Adds `seconds` in nanoseconds, rounded to the picosecond. More digits would show how sums are rounded.
  Line& add_seconds(const char* name, double seconds);
  /// Appends the line to `lines` if it has at least one number.
  void to(GoldenFile::Lines& lines) const;

 private:
  Line& add_text(const char* name, const std::string& text);

  std::string text_;
  bool is_empty_ = true;
};

}  // namespace tessera::testing
