// `main` of every program of Tessera's: the one place where a command ends.

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
  const char* const reason = errno != 0 ? std::strerror(errno) : "a write failed earlier";
  std::fprintf(stderr, "tessera: standard output could not be written: %s. hint: what was printed is not complete%s\n",
               reason, errno == ENOSPC ? "; free some space there, or send it elsewhere" : "");
  return code != 0 ? code : static_cast<int>(ExitCode::kIo);
}

}  // namespace
}  // namespace tessera::app

int main(int argc, char** argv) {
  return tessera::app::with_output_checked(tessera::app::run_command_line(argc, argv));
}
