#!/usr/bin/env python3
"""Measures the bytes per second of one TCP connection between the first two hosts of scripts/net_lab. It uses the
standard library only. The program is started once on each host. The first two ranks print a JSON line each, and the
others print nothing:

    {"rank", "one_way", "both_ways"}     bytes a second that this rank received; rank 1 has null in one_way

The program measures one direction, then both directions at once, since collectives send and receive at the same time.
The receiver measures the time, from the first bytes on. Bytes that sockets and queues still hold when the sender stops
are therefore counted too.
"""

import argparse
import json
import os
import socket
import sys
import threading
import time

CHUNK = 1 << 20
CONNECT_S = 15


def connection(rank, address):
    """Opens a connection to the other rank. Rank 0 listens."""
    if rank == 0:
        with socket.create_server(address) as server:
            server.settimeout(CONNECT_S)
            peer, _ = server.accept()
    else:
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                peer = socket.create_connection(address, timeout=CONNECT_S)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    peer.settimeout(CONNECT_S)
    return peer


def send(peer, seconds):
    data = bytes(CHUNK)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        peer.sendall(data)
    peer.shutdown(socket.SHUT_WR)


def received_per_s(peer):
    """Receives until the other side has sent everything. Returns the bytes per second."""
    buffer = memoryview(bytearray(CHUNK))
    peer.recv_into(buffer)
    begin, count = time.monotonic(), 0
    while got := peer.recv_into(buffer):
        count += got
        end = time.monotonic()
    return count / (end - begin)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, required=True, help="each way")
    options = parser.parse_args()
    rank, address = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if rank > 1:
        return 0
    one_way = None
    with connection(rank, address) as peer:
        if rank == 0:
            one_way = received_per_s(peer)
        else:
            send(peer, options.seconds)
    with connection(rank, (address[0], address[1] + 1)) as peer:
        sender = threading.Thread(target=send, args=(peer, options.seconds))
        sender.start()
        both_ways = received_per_s(peer)
        sender.join()
    # The line is written with one call, since the ranks share standard output.
    sys.stdout.write(json.dumps({"rank": rank, "one_way": one_way, "both_ways": both_ways}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
