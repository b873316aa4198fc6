"""Chooses ports for ranks that a test starts, as tests/support/free_port.h does."""

import itertools
import os
import socket

FIRST, PORTS, OF_PROCESS = 10_240, 21_760, 16
_numbers = itertools.count()


def free_port():
    """Returns a port on which no process listens now. The port lies below the ports that the kernel gives to
    connections, and processes with neighbouring numbers get different ports."""
    while True:
        port = FIRST + (os.getpid() * OF_PROCESS + next(_numbers)) % PORTS
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
