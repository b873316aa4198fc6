#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "tessera/exit_code.h"

namespace tessera {

/// The exception that Tessera throws. It is a c10::Error, because the autograd engine forwards only exceptions of that
/// type. It has the exit code with which the program should end; `tessera::run` ends the program with that code.
class Error : public c10::Error {
 public:
  /// `message`: the cause and the remedy, without a stack trace.
  Error(ExitCode code, const std::string& message)
      : c10::Error(c10::SourceLocation{"", "tessera", 0}, message), code_(code), message_(message) {}

  /// Returns the code with which the program should end (tessera/exit_code.h).
  ExitCode exit_code() const { return code_; }
  /// Returns the message without a stack trace.
  const std::string& message() const { return message_; }

 private:
  ExitCode code_;
  std::string message_;
};

}  // namespace tessera
