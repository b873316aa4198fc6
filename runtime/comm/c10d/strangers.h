#pragma once

#include <vector>

namespace tessera {

/// Connections that strangers open to a port of this job and leave idle: each takes a descriptor of this process, and neither the
/// store nor Gloo lets go of one. Where descriptors run out, Gloo's thread ends the process, and no file can be opened.
///
/// From now on `listener`, a listening socket of this process, has at most an eighth of the limit of descriptors, and 4096 at most, as
/// connections that have sent nothing (twice that for a moment). Beyond that the oldest of them are shut down; whoever holds them sees their end and closes them. A
/// rank sends as soon as it is connected, so none of the job's is among them. Costs nothing while nobody connects: a thread of
/// this process waits for connections, until the process ends. The socket stays its owner's, who may close it at any time.
void watch_for_strangers(int listener);

/// The listening sockets of this process, in order: what a library opened is what is there afterwards and was not before.
std::vector<int> listening_sockets();

}  // namespace tessera
