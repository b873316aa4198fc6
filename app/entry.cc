// `main` of every program of Tessera's: the one place where a command ends.

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "app/command_line.h"
#include "tessera/exit_code.h"

namespace tessera::app {
namespace {

/// What a command printed is its result: a success whose text did not reach where it was sent is none.
int with_output_checked(int code) {
  errno = 0;
  const bool flushed = std::fflush(stdout) == 0;
  if (flushed && std::ferror(stdout) == 0) return code;
  if (errno == 0 && ::write(STDOUT_FILENO, "\n", 1) == 1)
    errno = EIO;  // why an earlier write failed is not known any more
  std::fprintf(stderr, "tessera: standard output could not be written: %s. hint: what was printed is not complete%s\n",
               std::strerror(errno), errno == ENOSPC ? "; free some space there, or send it elsewhere" : "");
  return code != 0 ? code : static_cast<int>(ExitCode::kIo);
}

}  // namespace
}  // namespace tessera::app

int main(int argc, char** argv) {
  return tessera::app::with_output_checked(tessera::app::run_command_line(argc, argv));
}
