#include "workshop/app/command_line.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <system_error>

#include "runtime/base/process/process_limits.h"
#include "runtime/base/text.h"
#include "tessera/exit_code.h"
#include "workshop/app/parts.h"

namespace tessera::app {
namespace {

constexpr double kExact = 9007199254740992.0;  // doubles up to 2^53 hold every integer

std::optional<double> read_number(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && std::isfinite(value) ? std::optional(value) : std::nullopt;
}

std::optional<std::int64_t> read_integer(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size()) return value;
  const std::optional<double> number = read_number(text);
  if (!number || *number != std::floor(*number) || std::fabs(*number) > kExact) return std::nullopt;
  return static_cast<std::int64_t>(*number);
}

std::string got(const std::string& text) { return ", got " + quoted_text(text); }

std::vector<const CLI::App*> commands_of(const CLI::App& app) {
  return app.get_subcommands(std::function<bool(const CLI::App*)>());
}

std::vector<std::string> names_of(const std::vector<const CLI::App*>& commands) {
  std::vector<std::string> names;
  for (const CLI::App* command : commands) names.push_back(command->get_name());
  return names;
}

std::vector<std::string> names_of_options(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  return names;
}

std::string hint_of_options(const std::string& name, const std::vector<std::string>& options) {
  const std::string near = did_you_mean(name, options);
  return (near.empty() ? ". [T0013] hint: run with --help for all of them"
                       : near + " Run with --help for all of them") +
         ".";
}

/// Returns the first option in `words` that `command` does not have.
std::string unknown_option(const CLI::App& command, const std::vector<std::string>& words, std::size_t first) {
  for (std::size_t i = first; i < words.size(); ++i) {
    if (!words[i].starts_with("-") || words[i] == "-") continue;
    const bool is_long = words[i].starts_with("--");
    const std::string name = is_long ? words[i].substr(0, words[i].find('=')) : words[i].substr(0, 2);
    if (const CLI::Option* option = command.get_option_no_throw(name)) {
      const bool value_follows = option->get_items_expected_max() > 0 && name.size() == words[i].size();
      i += value_follows ? 1 : 0;
      continue;
    }
    if (!is_long) continue;  // CLI11 reports such a word: a stray letter, or a negative number
    return "`" + command.get_parent()->get_name() + " " + command.get_name() + "` has no option " + clipped(name, 80) +
           hint_of_options(name, names_of_options(command));
  }
  return "";
}

}  // namespace

CLI::Validator integer_from(std::int64_t least, std::int64_t most) {
  return {[least, most](std::string& text) -> std::string {
            const std::optional<std::int64_t> value = read_integer(text);
            if (!value || *value < least || *value > most)
              return "must be an integer from " + std::to_string(least) + " to " + std::to_string(most) + got(text);
            text = std::to_string(*value);
            return "";
          },
          std::to_string(least) + " to " + std::to_string(most)};
}

CLI::Validator number_from(double least, double most) {
  const auto number = [](double x) {
    char text[32];
    return std::string(text, std::to_chars(text, text + sizeof text, x).ptr);
  };
  const std::string range = number(least) + " to " + number(most);
  return {[least, most, range](std::string& text) -> std::string {
            const std::optional<double> value = read_number(text);
            return value && *value >= least && *value <= most ? "" : "must be a number from " + range + got(text);
          },
          range};
}

CLI::Validator not_empty() {
  return {[](std::string& text) -> std::string { return text.empty() ? "must not be empty" : ""; }, ""};
}

std::vector<std::string> take_words_behind_dashes(int& argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--") != 0) continue;
    std::vector<std::string> words(argv + i + 1, argv + argc);
    argc = i;
    return words;
  }
  return {};
}

std::string unknown_word(const CLI::App& app, const std::vector<std::string>& words) {
  const CLI::App* command = &app;
  std::size_t at = 0;
  while (at < words.size() && !words[at].starts_with("-")) {
    const auto commands = commands_of(*command);
    if (commands.empty()) break;
    const auto next = std::find_if(commands.begin(), commands.end(),
                                   [&](const CLI::App* each) { return each->get_name() == words[at]; });
    if (next == commands.end()) {
      const std::vector<std::string> names = names_of(commands);
      const std::string path = command == &app ? app.get_name() : app.get_name() + " " + command->get_name();
      return "`" + path + "` has no command " + quoted_text(words[at]) + hint_of_names(words[at], names);
    }
    command = *next;
    ++at;
  }
  if (command == &app || command->get_name() == "launch") return "";
  return unknown_option(*command, words, at);
}

CLI::App* add_command(CLI::App& app, const char* command) {
  return app.add_subcommand(command, part_with(command)->help);
}

int refuse(const std::string& what) {
  std::fprintf(stderr, "tessera: %s\n", what.c_str());
  return static_cast<int>(ExitCode::kUsage);
}

CommandLine::CommandLine()
    : app("Tessera trains LibTorch modules with parameters, gradients and optimizer state sharded over ranks.",
          "tessera") {
  take_process_limits();
  app.require_subcommand(1);
  // If an option is given twice, its last value counts, so that a script can append to a command line. Subcommands
  // inherit this.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.set_version_flag("--version", "tessera " TESSERA_VERSION);
}

std::optional<int> CommandLine::parse(int argc, char** argv) {
  if (const std::string slip = unknown_word(app, {argv + std::min(argc, 1), argv + argc}); !slip.empty())
    return refuse(slip);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : static_cast<int>(ExitCode::kUsage);
  }
  return std::nullopt;
}

bool CommandLine::got(const char* command, const char* section) const {
  if (!app.got_subcommand(command)) return false;
  return section == nullptr || app.get_subcommand(command)->got_subcommand(section);
}

}  // namespace tessera::app
