#pragma once

#include <span>
#include <string_view>

namespace tessera::app {

/// The commands of `tessera` that are programs of their own: tessera-train, tessera-bench, tessera-import-config. They lie
/// beside `tessera`, so that a build makes only those that it needs, and `tessera launch` starts without LibTorch.
struct Part {
  const char* command;  ///< "train"
  const char* program;  ///< "tessera-train"
  const char* help;     ///< one line of `tessera --help`
};

std::span<const Part> parts();
/// Null where `command` is none of theirs.
const Part* part_with(std::string_view command);

/// Becomes the part's program, which reads the same `argv`. Returns only where that is not there (69) or cannot be run (77),
/// after a line on stderr that says how to build it.
int run_part(const Part& part, char** argv);

}  // namespace tessera::app
