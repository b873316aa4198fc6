#pragma once

#include <absl/status/status.h>

#include <cstdio>

#include "runtime/base/status.h"

namespace tessera::app {

/// Returns the exit code of a command that ended with `status`: 0, or the status's code, after its message was printed
/// on stderr.
inline int exit_code_after(const absl::Status& status) {
  if (status.ok()) return 0;
  std::fprintf(stderr, "%s\n", message_of(status).c_str());
  return static_cast<int>(exit_code_of(status));
}

}  // namespace tessera::app
