// This file has `main` of all of Tessera's programs. The process of a command ends only here.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>

#include "runtime/base/errno_hint.h"
#include "tessera/exit_code.h"
#include "workshop/app/command_line.h"

namespace tessera::app {
namespace {

/// Returns the exit code of the command. An exception becomes a message, and does not end the process by a signal.
int run(int argc, char** argv) {
  try {
    return run_command_line(argc, argv);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tessera: out of memory. %s\n", limit_hint(ENOMEM).c_str());
    return static_cast<int>(ExitCode::kOsResource);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(ExitCode::kInternal);
  }
}

/// The text that a command prints is its result. If the text could not be written, the command did not succeed.
int with_output_checked(int code) {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return code;
  if (errno == 0 && ::write(STDOUT_FILENO, "\n", 1) == 1) errno = EIO;  // an earlier write failed; its errno is lost
  std::fprintf(stderr,
               "tessera: standard output could not be written: %s. [T0017] hint: what was printed is not complete%s\n",
               std::strerror(errno), errno == ENOSPC ? "; free some space there, or send it elsewhere" : "");
  return code != 0 ? code : static_cast<int>(ExitCode::kIo);
}

}  // namespace
}  // namespace tessera::app

int main(int argc, char** argv) { return tessera::app::with_output_checked(tessera::app::run(argc, argv)); }
