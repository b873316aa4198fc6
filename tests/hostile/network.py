"""Makes cases with strangers (processes outside the job) that connect to the ports of a job, and with listeners that
are no store."""

import random
import socket
import struct
import time

from case import PEER, RESOURCE, UNAVAILABLE, Case
from seeds import TRAIN

JOB = [*TRAIN, "--strategy", "gloo.json", "--steps", "60"]
HERE = "127.0.0.1"


def connect(port, seconds=10):
    """Returns a connection as soon as a process listens at the port, or None if none does."""
    for _ in range(int(seconds / 0.02)):
        try:
            return socket.create_connection((HERE, port), timeout=2)
        except OSError:
            time.sleep(0.02)
    return None


def send(connection, data):
    try:
        connection.sendall(data)
    except OSError:
        pass  # the listener closed the connection, which is an answer


# Requests to LibTorch's store. Each has one byte for the kind, then texts, and each text comes after its length.
HELLO = struct.pack("<BI", 0, 0x3C85F7CE)


def text(data, length=None):
    return struct.pack("<Q", len(data) if length is None else length) + data


def silence(connection):
    pass


def says(data):
    return lambda connection: send(connection, data)


def slowly(connection):
    for byte in b"GET / HTTP/1.1\r\nHost: a\r\n\r\n":
        send(connection, bytes([byte]))
        time.sleep(0.01)


def half_open(connection):
    connection.shutdown(socket.SHUT_WR)


def reset(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    send(connection, b"\x00" * 10)
    connection.close()


def takes_no_answer(connection):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    send(connection, HELLO + b"".join(struct.pack("<B", 3) + text(b"init/") for _ in range(100)))


RANDOM = random.Random(5)
WAYS = [  # Each entry is (name, family, action on one connection, number of connections)
    ("silent connections", "silence", silence, 50),
    ("connections that end at once", "cut", lambda connection: connection.close(), 50),
    ("connections that are reset", "cut", reset, 20),
    ("half-open connections", "silence", half_open, 20),
    ("a request of HTTP", "noise", says(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"), 3),
    ("a request of HTTP, byte by byte", "silence", slowly, 1),
    ("a hello of TLS", "noise", says(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500)), 3),
    ("random bytes", "noise", lambda connection: send(connection, RANDOM.randbytes(300)), 20),
    ("a megabyte of random bytes", "huge", lambda connection: send(connection, RANDOM.randbytes(1 << 20)), 2),
    ("zeros", "noise", says(bytes(64)), 10),
    ("ones", "lying length", says(b"\xff" * 64), 10),
    ("a hello of the store, and silence", "silence", says(HELLO), 5),
    ("a hello of the store, cut", "cut", says(HELLO[:3]), 5),
    ("a wrong hello of the store", "noise", says(struct.pack("<BI", 0, 1)), 5),
    ("a question that there is not", "noise", says(HELLO + b"\xc8"), 5),
    ("a key of 2^63 bytes", "lying length", says(HELLO + b"\x01" + text(b"key", 1 << 63)), 3),
    ("a key of a gigabyte", "lying length", says(HELLO + b"\x01" + text(b"key", 1 << 30)), 3),
    ("a value of 2^64 - 1 bytes", "lying length", says(HELLO + b"\x01" + text(b"key") + text(b"value", (1 << 64) - 1)), 3),
    ("2^63 keys at once", "lying length", says(HELLO + b"\x0a" + struct.pack("<Q", 1 << 63)), 3),
    ("a wait for what never comes", "silence", says(HELLO + b"\x06" + struct.pack("<Q", 1) + text(b"never")), 5),
    ("a hundred questions whose answers are not read", "silence", takes_no_answer, 2),
]


def disturb(ports_of, way, count, then=None):
    def stranger(job):
        kept = []
        for port in ports_of(job):
            for _ in range(count):
                connection = connect(port)
                if connection is None:
                    break
                kept.append(connection)
                try:
                    way(connection)
                except OSError:
                    pass
        if then:
            then(job)
        time.sleep(600)  # the stranger ends with the job, and holds its connections until then
    return stranger


def store(job):
    return [job.port]


def gloo(job):
    """Returns the ports of both ranks, without the store's port, after the ranks have begun to listen."""
    for _ in range(500):
        found = [[port for port in job.listening(rank) if port != job.port] for rank in (0, 1)]
        if all(len(ports) >= 2 for ports in found):  # one port is only for the rank that watches this rank
            return found[0] + found[1]
        time.sleep(0.02)
    return []


def strangers():
    for number, (what, kind, way, count) in enumerate(WAYS):
        # A stranger that speaks the store's protocol may end a job (SECURITY.md).
        codes = (0,) if "store" not in what and kind != "lying length" else (0, PEER, RESOURCE)
        yield Case("network", "the store before the ranks have met", what, kind, JOB, codes, ranks=2, late=(1,), at_rest=60, says=200_000,
                   stranger=disturb(store, way, count, lambda job: job.go_on()))
        yield Case("network", "the store of a job that trains", what, kind, JOB, codes, ranks=2, at_rest=60, says=200_000, stranger=disturb(store, way, count))
        yield Case("network", "Gloo's ports", what, kind, JOB, codes, ranks=2, at_rest=60, says=200_000, stranger=disturb(gloo, way, count))


def answer(data, shut=False, reads=True):
    """Returns a listener that takes the place of the store at the store's port."""
    def stranger(job):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((HERE, job.port))
            listener.listen(50)
            job.go_on()
            kept = []
            while True:
                connection, _ = listener.accept()
                kept.append(connection)
                if reads:
                    connection.settimeout(0.2)
                    try:
                        connection.recv(4096)
                    except OSError:
                        pass
                send(connection, data)
                if shut:
                    connection.close()
    return stranger


def false_stores():
    short = ["--strategy", "short.json"]

    def prepare(folder):
        (folder / "short.json").write_text((folder / "gloo.json").read_text().replace('"init_timeout_s": 30', '"init_timeout_s": 2'))
    ways = [("it keeps silent", "silence", answer(b"", reads=False)), ("it shuts at once", "cut", answer(b"", shut=True, reads=False)),
            ("it answers in HTTP", "noise", answer(b"HTTP/1.1 400 Bad Request\r\n\r\n", shut=True)), ("it answers random bytes", "noise", answer(random.Random(7).randbytes(64))),
            ("it answers with a length of 2^64 - 1", "lying length", answer(b"\xff" * 64)), ("it answers with a length of a terabyte", "lying length", answer(struct.pack("<Q", 1 << 40))),
            ("it answers zeros without an end", "huge", answer(bytes(1 << 22)))]
    for what, kind, stranger in ways:
        yield Case("network", "a listener at the store's port", what, kind, [*JOB, *short], (PEER, UNAVAILABLE), prepare, ("127.0.0.1:",), ranks=2, only=(1,), late=(1,),
                   at_rest=30, says=200_000, stranger=stranger)
        yield Case("network", "a listener at the store's port, of rank 0", what, kind, [*JOB, *short], (UNAVAILABLE, PEER), prepare, ("port", "127.0.0.1"), ranks=2, only=(0,),
                   late=(0,), at_rest=30, says=200_000, stranger=stranger)


def network_cases():
    yield from strangers()
    yield from false_stores()
