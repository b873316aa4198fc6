#pragma once

namespace tessera {

/// The limits of this process (`ulimit`), each met as an error that names it (errno_hint.h): exit code 71 or 74, and never a signal.

/// From now on a write beyond the limit of file sizes fails with EFBIG, for every writer of this process. The kernel's
/// signal, SIGXFSZ, would end it. A program's own handler stays, and a program that this one starts has the signal as
/// before. What writes files calls it, as does whatever begins a program; any thread may, any number of times.
void turn_size_signal_into_error();

/// The same of SIGPIPE: a send to a peer that has died fails with EPIPE, and this rank can say who died. Gloo and c10d's store send without
/// MSG_NOSIGNAL, and count on a Python that has turned the signal off. What opens their connections calls it.
void turn_pipe_signal_into_error();

/// Takes as many descriptors as the hard limit allows: gathers over a network, checkpoints and records in files need many, and
/// Debian's soft limit is 1024. For whatever begins a program of Tessera's. Calls turn_size_signal_into_error too.
void take_process_limits();

/// Starts `count` threads and ends them. 0, or the errno of the system's refusal. LibTorch's own threads would end the
/// process without a word of ours (libgomp).
int try_threads(int count);

}  // namespace tessera
