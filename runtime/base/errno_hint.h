#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/exit_code.h"

namespace tessera {

/// The meaning of an errno for a user: its text, the exit code, and what to do. errno_hint.cc has a table with one row
/// for each errno. Any thread may call these functions.

/// Returns a text such as "No space left on device (errno 28)".
std::string errno_text(int error);

/// If `error`, an errno, means that a limit is reached, returns a hint that names this limit: "hint: raise the limit of
/// open files (ulimit -n), which is 1024 here". The hint is empty for every other errno. EAGAIN counts as the limit of
/// processes and threads.
std::string limit_hint(int error);

/// Returns errno_text(error), and ". " with limit_hint if the errno means that a limit is reached. Use it for failures
/// that concern no file.
std::string reason_of(int error);

/// Returns errno_text(error) for a file that could not be opened or read. It adds a remedy as ". hint: ..." if the
/// system's text does not say enough.
std::string reason_of_reading(int error);

/// Returns errno_text(error) for a file or folder that could not be made or written. It adds a remedy, as
/// reason_of_reading does. `wanted`: the number of bytes that were to be written, if it is known.
std::string reason_of_writing(int error, std::int64_t wanted = -1);

/// Returns the errno of the limit that another library's text mentions ("accept: Too many open files"); 0 if it
/// mentions none.
int limit_in(std::string_view text);

/// Returns the exit code of a failed read or write: 77 if permission is missing; 71 if memory, descriptors or processes
/// ran out; 73 if the path cannot hold the file; 74 for everything else. Examples of 74 are EIO, a full disk, a file
/// beyond the limit of sizes, and a file that ended too early (errno 0).
ExitCode exit_code_of_errno(int error);

/// Returns the exit code for a user's output file that could not be opened: 77 if permission is missing or the file
/// system is mounted read-only; 71 if a limit is reached; 73 for everything else.
ExitCode exit_code_of_creating(int error);

}  // namespace tessera
