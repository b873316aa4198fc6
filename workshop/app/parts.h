#pragma once

#include <span>
#include <string_view>

namespace tessera::app {

/// The commands of `tessera` that other programs or modules run. Most of them belong to the programs tessera-train and
/// tessera-bench. These programs lie beside `tessera`. A build can therefore make only the programs that it needs,
/// and `tessera launch` starts without LibTorch. Other commands are modules of the Python package.
struct Part {
  const char* command;           ///< name of the command, such as "train"
  const char* program;           ///< the command's program, such as "tessera-train"; null if a Python module has it
  const char* help;              ///< one line of `tessera --help`
  const char* module = nullptr;  ///< the command's Python module, such as "tessera.import_config"
};

/// Returns all parts, in the order of `tessera --help`.
std::span<const Part> parts();
/// Returns the part that has `command`; null if none has it.
const Part* part_with(std::string_view command);

/// Replaces this process by the part's program, which reads the same `argv`. The function returns only in three cases,
/// each after a line on stderr. If the program does not exist (69), the line says how to build it. If it cannot be run
/// (77), the line says that it must be executable. If a module has the command (64), the line says how to call it.
int run_part(const Part& part, char** argv);

}  // namespace tessera::app
