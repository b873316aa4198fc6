#pragma once

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <c10/util/Exception.h>

#include <string>
#include <utility>

#include "runtime/base/status.h"

namespace tessera {

/// What Tessera throws from forward, backward, hooks and the Engine: a c10::Error, because the autograd engine forwards
/// exceptions and nothing else, with the exit code of the status it was made from.
///
/// This header is the border between the two error channels: below it `absl::Status`, above it exceptions.
class Error : public c10::Error {
 public:
  Error(ExitCode code, const std::string& message)
      : c10::Error(c10::SourceLocation{"", "tessera", 0}, message), code_(code), message_(message) {}
  explicit Error(const absl::Status& status) : Error(exit_code_of(status), message_of(status)) {}

  ExitCode exit_code() const { return code_; }
  /// The message alone, without a stack trace.
  const std::string& message() const { return message_; }

 private:
  ExitCode code_;
  std::string message_;
};

inline void throw_if_error(const absl::Status& status) {
  if (!status.ok()) throw Error(status);
}

template <class T>
T value_or_throw(absl::StatusOr<T> result) {
  if (!result.ok()) throw Error(result.status());
  return *std::move(result);
}

}  // namespace tessera
