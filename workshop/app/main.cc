// tessera <command> ...: starts ranks by itself, and hands every other command to the program that has it. Nothing here
// needs LibTorch, so a launcher starts at once.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "runtime/base/text.h"
#include "runtime/config/strategy_docs.h"
#include "workshop/app/command_line.h"
#include "workshop/app/parts.h"
#include "workshop/launch/launcher.h"

namespace tessera::app {
namespace {

constexpr std::int64_t kMostRestarts = 1000;

void add_launch(CLI::App& app, LaunchOptions& launch) {
  CLI::App* command = app.add_subcommand("launch", "start ranks on this machine: tessera launch -n 4 -- program args");
  command->add_option("-n,--ranks", launch.ranks, "ranks to start")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command->add_option("--pretend-hosts", launch.hosts, "hosts that ranks are told of, for tests: all are started here")
      ->transform(integer_from(1, kMostLaunched))
      ->capture_default_str();
  command->add_option("--port", launch.port, "rendezvous port; 0: a free one")
      ->transform(integer_from(0, 65535))
      ->capture_default_str();
  command->add_option("--grace", launch.grace_s, "seconds for the other ranks after a failure")
      ->check(number_from(0, 1e6))
      ->capture_default_str();
  command
      ->add_option("--max-restarts", launch.max_restarts,
                   "starts of all ranks again, after failures that may not come back")
      ->transform(integer_from(0, kMostRestarts))
      ->capture_default_str();
  command->add_flag("--strict", launch.strict,
                    "ranks as if each had a host of its own: private copies of parameters, and writes to them checked");
  command->add_flag("--plan", launch.plan, "say the whole memory plan, a row a kind of memory, not one line of it");
  command->add_flag("!--no-prefix", launch.prefix, "do not put [rank n] before lines");
  command->prefix_command();  // the first word that is no option is the program, with or without a "--" before it
}

/// Takes what stands behind the first "--": it belongs to the program to launch, and is not looked at.
std::vector<std::string> take_program(int& argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--") != 0) continue;
    std::vector<std::string> program(argv + i + 1, argv + argc);
    argc = i;
    return program;
  }
  return {};
}

/// The number behind --hosts, which meant pretended hosts in 0.1.
std::optional<std::string> bare_hosts(const std::vector<std::string>& words) {
  const std::string option = "--hosts";
  std::string value;
  if (words[0].starts_with(option + "=")) value = words[0].substr(option.size() + 1);
  if (words[0] == option && words.size() > 1) value = words[1];
  const bool is_number = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
  return is_number ? std::optional(value) : std::nullopt;
}

/// Takes a program that was given without "--": its words are those that `launch` did not take. Returns what is wrong
/// with them.
std::string take_words(const CLI::App& command, LaunchOptions& launch) {
  const std::vector<std::string> words = command.remaining();
  if (words.empty()) return "";
  if (const std::optional<std::string> hosts = bare_hosts(words))
    return "`tessera launch --hosts " + clipped(*hosts, 80) +
           "`: --hosts takes no number. [T0761] hint: pretended hosts, for "
           "tests, are --pretend-hosts " +
           clipped(*hosts, 80);
  if (words[0].starts_with("-"))
    return "`tessera launch` has no option " + clipped(words[0], 80) +
           ". [T0018] hint: write tessera launch -n 4 -- program args";
  if (!launch.command.empty())
    return "`tessera launch` got two programs: " + clipped(words[0], 80) + ", and " +
           clipped(launch.command.front(), 80) +
           " behind the \"--\". [T0019] hint: write tessera launch -n 4 -- program args";
  launch.command = words;
  return "";
}

}  // namespace

int run_command_line(int argc, char** argv) {
  if (const Part* const part = argc > 1 ? part_with(argv[1]) : nullptr) return run_part(*part, argv);
  CommandLine line;
  LaunchOptions launching;
  for (const Part& part : parts()) add_command(line.app, part.command);  // --help and the search for slips need them
  add_launch(line.app, launching);
  line.app.add_subcommand("schema", "print the JSON schema of the strategy file");
  launching.command = take_program(argc, argv);
  if (const auto code = line.parse(argc, argv)) return *code;
  if (line.got("launch")) {
    const std::string slip = take_words(*line.app.get_subcommand("launch"), launching);
    return slip.empty() ? launch(launching) : refuse(slip);
  }
  std::fputs(strategy_schema().c_str(), stdout);
  return 0;
}

}  // namespace tessera::app
