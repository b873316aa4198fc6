#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::app {

/// Helpers of Tessera's command lines that CLI11 lacks: errors that name the bounds, and suggestions for typing errors.

/// Accepts an integer in [least, most], written as 1000, 1000.0 or 1e3, as in the strategy file. Refuses numbers that
/// 64 bits cannot hold, which CLI11 would cut. Use it with `transform`.
CLI::Validator integer_from(std::int64_t least, std::int64_t most);
/// Accepts a finite number in [least, most].
CLI::Validator number_from(double least, double most);
/// Accepts a path or text that is not empty.
CLI::Validator not_empty();

/// Removes the words after the first "--" from the command line, and returns them. They belong to another program, and
/// are not read.
std::vector<std::string> take_words_behind_dashes(int& argc, char** argv);

constexpr std::int64_t kMostLaunched = 1024;  ///< the largest number of ranks on one machine

/// Runs the work of a program. Each program's main file defines it. entry.cc calls it, and changes the exit code 0 to
/// 74 if standard output could not be written.
int run_command_line(int argc, char** argv);

/// Prints one line on stderr. Returns 64, the exit code of a wrong command line.
int refuse(const std::string& what);

/// The command line of one of the programs.
struct CommandLine {
  CommandLine();

  /// Reads the command line into the variables of `app`'s options. Returns an exit code if the program ends here: after
  /// --help or --version, or 64 after a line that describes the error.
  std::optional<int> parse(int argc, char** argv);
  /// Returns whether the command line has `command`, and its `section`, if one is named.
  bool got(const char* command, const char* section = nullptr) const;

  CLI::App app;
};

/// Adds a command, with its line of help. REQUIRES: parts.h has the command.
CLI::App* add_command(CLI::App& app, const char* command);

/// Checks the words after the program's name before their values are read. Returns a text that describes the error: the
/// command does not exist, or the command has no such option. The text suggests the name that was probably meant. The
/// text is empty if there is no error. Words after `launch` are not checked, since they belong to the launched program.
std::string unknown_word(const CLI::App& app, const std::vector<std::string>& words);

}  // namespace tessera::app
