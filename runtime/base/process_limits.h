#pragma once

#include <string>
#include <string_view>

#include "tessera/exit_code.h"

namespace tessera {

/// The limits of this process (`ulimit`), each met as an error that names it: exit code 71 or 74, and never a signal.

/// From now on a write beyond the limit of file sizes fails with EFBIG, for every writer of this process. The kernel's
/// signal, SIGXFSZ, would end it. A program's own handler stays, and a program that this one starts has the signal as
/// before. What writes files calls it, as does whatever begins a program; any thread may, any number of times.
void turn_size_signal_into_error();

/// Takes as many descriptors as the hard limit allows: gathers over a network, checkpoints and records in files need many, and
/// Debian's soft limit is 1024. For whatever begins a program of Tessera's. Calls turn_size_signal_into_error too.
void take_process_limits();

/// Starts `count` threads and ends them. 0, or the errno of the system's refusal. LibTorch's own threads would end the
/// process without a word of ours (libgomp).
int try_threads(int count);

/// "No space left on device (errno 28)".
std::string errno_text(int error);

/// What to raise where `error`, an errno, is a limit's: "hint: raise the limit of open files (ulimit -n), which is 1024
/// here". Empty for every other errno. EAGAIN is that of processes and threads.
std::string limit_hint(int error);

/// The same of what the system said: errno_text(error), and limit_hint where there is one.
std::string reason_of(int error);

/// The errno of the limit that a text of another library speaks of ("accept: Too many open files"); 0: of none.
int limit_in(std::string_view text);

/// 77 permission; 71 memory, descriptors, processes; 73 a path that cannot hold the file; 74 everything else: EIO, a full
/// disk, a file beyond the limit of sizes, a file that ended too early (0).
ExitCode exit_code_of_errno(int error);

}  // namespace tessera
