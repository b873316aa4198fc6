#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "tessera/exit_code.h"

namespace tessera {

/// What Tessera throws: a c10::Error, because the autograd engine forwards exceptions of that type and no others, with
/// the exit code that the program should end with (`tessera::run` does that).
class Error : public c10::Error {
 public:
  Error(ExitCode code, const std::string& message)
      : c10::Error(c10::SourceLocation{"", "tessera", 0}, message), code_(code), message_(message) {}

  ExitCode exit_code() const { return code_; }
  /// The message alone, without a stack trace.
  const std::string& message() const { return message_; }

 private:
  ExitCode code_;
  std::string message_;
};

}  // namespace tessera
