#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "tessera/exit_code.h"

namespace tessera {

/// What an errno means to a user: its text, the exit code, and what to do. errno_hint.cc has a table with a row for each.

/// "No space left on device (errno 28)".
std::string errno_text(int error);

/// What to raise where `error`, an errno, is a limit's: "hint: raise the limit of open files (ulimit -n), which is 1024 here".
/// Empty for every other errno. EAGAIN is that of processes and threads.
std::string limit_hint(int error);

/// errno_text(error), and where the errno is a limit's ". " with limit_hint. For what concerns no file.
std::string reason_of(int error);

/// The same of a file that could not be opened or read: errno_text(error), and ". hint: ..." with what to do, where anybody can say more than
/// the system.
std::string reason_of_reading(int error);

/// The same of a file or folder that could not be made or written. `wanted`: bytes that were to be written, if that is known.
std::string reason_of_writing(int error, std::int64_t wanted = -1);

/// The errno of the limit that a text of another library speaks of ("accept: Too many open files"); 0: of none.
int limit_in(std::string_view text);

/// 77 permission; 71 memory, descriptors, processes; 73 a path that cannot hold the file; 74 everything else: EIO, a full
/// disk, a file beyond the limit of sizes, a file that ended too early (0).
ExitCode exit_code_of_errno(int error);

/// The exit code where a file for a user's output could not be opened: 77 permission, which a file system mounted read-only is too;
/// that of a limit; 73 everything else.
ExitCode exit_code_of_creating(int error);

}  // namespace tessera
