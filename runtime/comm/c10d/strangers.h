#pragma once

#include <vector>

namespace tessera {

/// Protects this process from connections that strangers open to a port of this job and leave idle. Each such
/// connection takes a descriptor, and neither the store nor Gloo closes it. If descriptors run out, Gloo's thread ends
/// the process, and no file can be opened.
///
/// This function limits, from now on, the silent connections of `listener`, a listening socket of this process. At most
/// a sixteenth of the limit of descriptors, and at most 4096, may be connections that have sent nothing (for a moment,
/// twice as many). If there are more, the oldest connections are shut down. The code that owns such a connection
/// notices its end and closes it. If a burst opens more than twice as many descriptors as this limit allows, the kernel
/// drops new requests for a while. Their clients ask again after a second. A rank sends as soon as it is connected, so
/// no connection of the job is shut down. The limit costs nothing while nobody connects: a thread of this process waits
/// for connections until the process ends. The owner of the socket may close the socket at any time.
void watch_for_strangers(int listener);

/// Makes the kernel send something twice a minute over each idle connection from this process to `port`, the port of
/// the other end. No firewall between hosts then forgets the connection, and the kernel does not end it within an hour.
/// c10d gives no access to its connection to the store. This connection may be idle for as long as an Engine trains.
void keep_from_idling(int port);

/// Returns the listening sockets of this process, in order. To find the sockets that a library opened, call this before
/// and after the library's call: the new sockets are the library's.
std::vector<int> listening_sockets();

}  // namespace tessera
