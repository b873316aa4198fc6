// tessera-import-config: reads its command line, and nothing else.

#include <CLI/CLI.hpp>

#include "app/command_line.h"
#include "app/commands.h"
#include "app/import/translate.h"

namespace tessera::app {
namespace {

void add_import_config(CLI::App& app, ImportConfigCommand& config) {
  CLI::App* command = add_command(app, "import-config");
  command->add_option("file", config.file, "JSON or YAML (docs/import-config.md)")->required()->check(not_empty());
  command->add_option("--format", config.format, "deepspeed, accelerate or fsdp; default: the keys tell")
      ->check(CLI::IsMember(import_format_names()));
  command->add_option("--out", config.out, "strategy file; default: stdout")->check(not_empty());
  command->add_flag("--overwrite", config.overwrite, "replace a file that exists; otherwise it is kept, an error");
  command->add_flag("--skip-refused", config.skip_refused, "leave out keys that the strategy cannot say");
}

}  // namespace

int run_command_line(int argc, char** argv) {
  CommandLine line;
  ImportConfigCommand config;
  add_import_config(line.app, config);
  if (const auto code = line.parse(argc, argv)) return *code;
  return run_import_config(config);
}

}  // namespace tessera::app
