// The program `tessera`. It runs the command `launch` itself, and hands every other command to the program that has it.
// Nothing here needs LibTorch, so a launcher starts at once.

#include <cstdio>
#include <cstring>

#include "runtime/config/strategy_docs.h"
#include "workshop/app/command_line.h"
#include "workshop/app/launch_line.h"
#include "workshop/app/parts.h"
#include "workshop/launch/agent.h"

namespace tessera::app {

int run_command_line(int argc, char** argv) {
  if (const Part* const part = argc > 1 ? part_with(argv[1]) : nullptr) return run_part(*part, argv);
  if (argc == 2 && std::strcmp(argv[1], "launch-agent") == 0) return serve_launch_agent();
  CommandLine line;
  LaunchLine launching;
  for (const Part& part : parts()) add_command(line.app, part.command);  // --help and hints need all parts
  launching.add_to(line.app);
  line.app.add_subcommand("schema", "print the JSON schema of the strategy file");
  launching.options.command = take_words_behind_dashes(argc, argv);
  if (const auto code = line.parse(argc, argv)) return *code;
  if (line.got("launch")) return launching.run();
  std::fputs(strategy_schema().c_str(), stdout);
  return 0;
}

}  // namespace tessera::app
