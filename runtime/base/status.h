#pragma once

// See docs/glossary.md: tensor line.

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include <string>

#include "tessera/exit_code.h"

namespace tessera {

/// Failures below the tensor line (files, rendezvous, transports, configuration) are `absl::Status`, made by this
/// function. The status keeps its exit code, so the end of the program needs no table from statuses to exit codes.
absl::Status make_error(ExitCode code, std::string message);

/// Returns the exit code that a status was made with. If make_error did not make the status, returns the exit code that
/// fits the `absl::StatusCode` best.
ExitCode exit_code_of(const absl::Status& status);

/// Marks a failure that happened on another rank and that was only reported to this rank. Such a failure is never a
/// job's first cause.
absl::Status told_by_peer(absl::Status status);
bool is_told_by_peer(const absl::Status& status);

/// Returns the message as a `std::string` (absl's `string_view` is not `std::string_view` in every build).
std::string message_of(const absl::Status& status);

}  // namespace tessera

#define TESSERA_CONCAT_(a, b) a##b
#define TESSERA_CONCAT(a, b) TESSERA_CONCAT_(a, b)

/// Returns from the calling function if `expression` (an `absl::Status`) is not OK.
#define TESSERA_RETURN_IF_ERROR(expression)                         \
  do {                                                              \
    if (auto status_ = (expression); !status_.ok()) return status_; \
  } while (false)

/// `TESSERA_ASSIGN_OR_RETURN(auto x, f());` returns from the calling function if `f()` (a StatusOr) failed.
#define TESSERA_ASSIGN_OR_RETURN(lhs, expression) \
  TESSERA_ASSIGN_OR_RETURN_(TESSERA_CONCAT(status_or_, __LINE__), lhs, expression)
#define TESSERA_ASSIGN_OR_RETURN_(name, lhs, expression) \
  auto name = (expression);                              \
  if (!name.ok()) return std::move(name).status();       \
  lhs = *std::move(name)
