#pragma once

#include <absl/status/status.h>

#include <exception>
#include <optional>
#include <string>

#include "tessera/exit_code.h"

namespace tessera {

/// What was thrown, as a status with an exit code: Tessera's own as they are, std::bad_alloc 71, what names a limit of
/// the process ("Too many open files") 71 or 74, all others 70. Stack traces that LibTorch puts below a message are left out.
absl::Status status_of(const std::exception_ptr& failure);

/// The last words of this process in the form that torchrun and `tessera launch` read:
///
///     {"message": {"message": "...", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000",
///                                                  "told_by_peer": false, "code_of_tessera": 70}}}
///
/// `told_by_peer`: they are about another rank's failure (is_told_by_peer), which `tessera launch` looks for instead.
/// `code`: with which Tessera ends the process; none where the program chose its exit code itself.
/// Nothing happens if $TORCHELASTIC_ERROR_FILE is not set, or cannot be written: there is an error to report already.
void write_error_file(const std::string& message, const std::string& call_stack, bool told_by_peer,
                      std::optional<ExitCode> code);

}  // namespace tessera
