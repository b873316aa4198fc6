#pragma once

#include <absl/status/status.h>

#include <exception>
#include <optional>
#include <string>

#include "tessera/exit_code.h"

namespace tessera {

/// Turns an exception into a status with an exit code. Tessera's own errors keep their exit codes. std::bad_alloc and
/// LibTorch's OutOfMemoryError get 71. Texts that name a limit of the process ("Too many open files") get 71 or 74. All
/// other exceptions get 70. The stack trace that LibTorch puts below a message is left out.
absl::Status status_of(const std::exception_ptr& failure);

/// Writes the error report of this process in the form that torchrun and `tessera launch` read:
///
///     {"message": {"message": "...", "extraInfo": {"py_callstack": "...", "timestamp": "1700000000",
///                                                  "told_by_peer": false, "code_of_tessera": 70}}}
///
/// `told_by_peer`: the report is about another rank's failure (is_told_by_peer), and `tessera launch` looks for that
/// rank's report instead. `code`: the exit code with which Tessera ends the process; it has no value if the program
/// chose its own code. Nothing happens if $TORCHELASTIC_ERROR_FILE is not set or cannot be written; a further error
/// would hide the error that is being reported.
void write_error_file(const std::string& message, const std::string& call_stack, bool told_by_peer,
                      std::optional<ExitCode> code);

/// Lets `tessera launch` know that this worker of an elastic run writes the results. It makes the file
/// "$TORCHELASTIC_ERROR_FILE.results". The file has the text "to write" if `are_left`, and "written" once the results
/// are written. Nothing happens in a process that is no worker of that launcher.
void note_results_to_write(bool are_left);

/// Lets `tessera launch --servers` know that this rank has joined the parameter servers: it makes the file
/// "$TORCHELASTIC_ERROR_FILE.joined". If the rank ends after that, the other ranks continue. If it ends before that,
/// the other ranks cannot begin, since all ranks must join first.
/// Nothing happens in a process that this launcher has not started.
void note_joined();

}  // namespace tessera
