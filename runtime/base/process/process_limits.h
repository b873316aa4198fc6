#pragma once

namespace tessera {

/// The limits of this process (`ulimit`). A limit that is reached becomes an error that names it (errno_hint.h), with
/// exit code 71 or 74, and never a signal.

/// Makes writes beyond the limit of file sizes fail with EFBIG, for every writer of this process, from now on. The
/// kernel's signal, SIGXFSZ, would end the process. A program's own handler stays, and programs that this program
/// starts have the signal as before. Code that writes files or starts a program calls this function. Any thread may
/// call it, also more than once.
void turn_size_signal_into_error();

/// Makes a send fail with EPIPE if the peer has died, so that this rank can report which rank died. SIGPIPE would end
/// the process. Gloo and c10d's store send without MSG_NOSIGNAL: they rely on Python, which turns the signal off. Code
/// that opens their connections calls this function.
void turn_pipe_signal_into_error();

/// Raises the soft limit of descriptors to the hard limit. Gathers over a network, checkpoints and records in files
/// need many descriptors, and Debian's soft limit is 1024. Programs of Tessera call this function at their start. This
/// function calls turn_size_signal_into_error and fill_standard_descriptors too.
void take_process_limits();

/// Opens /dev/null as those of the descriptors 0, 1 and 2 that are closed, as after `program >&- 2>&-`. Otherwise the
/// next files that the process opens would get these numbers, and what it prints would be written into them. Reads of
/// standard input and writes to standard output still fail with EBADF, so lost output is noticed.
void fill_standard_descriptors();

/// Starts `count` threads and ends them. Returns 0, or the errno of the system's refusal. Tessera tries this first,
/// because libgomp, which starts LibTorch's threads, ends the process without a message of Tessera if the system
/// refuses a thread.
int try_threads(int count);

}  // namespace tessera
