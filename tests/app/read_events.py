"""Reads an event file of TensorBoard strictly, with the standard library only, and prints one JSON object for each
scalar.

Usage: read_events.py FILE. It ends with 1 if a length, a checksum or a message does not have the required form.
"""

import json
import struct
import sys


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def unmasked(crc: int) -> int:
    rotated = (crc - 0xA282EAD8) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def records(data: bytes):
    at = 0
    while at < len(data):
        length, length_crc = struct.unpack_from("<QI", data, at)
        assert unmasked(length_crc) == crc32c(data[at:at + 8]), f"checksum of the length at {at}"
        record = data[at + 12:at + 12 + length]
        (record_crc,) = struct.unpack_from("<I", data, at + 12 + length)
        assert len(record) == length and unmasked(record_crc) == crc32c(record), f"checksum of the record at {at}"
        yield record
        at += 12 + length + 4


def varint(data: bytes, at: int):
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        shift += 7
        at += 1
        if data[at - 1] < 0x80:
            return value, at


def fields(message: bytes):
    """Yields (number, value) of each field. A field with a length has bytes as its value."""
    at = 0
    while at < len(message):
        key, at = varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(message, at)
        elif kind == 2:
            length, at = varint(message, at)
            value, at = message[at:at + length], at + length
            assert len(value) == length
        else:
            assert kind in (1, 5), f"wire type {kind}"
            value, at = struct.unpack_from("<d" if kind == 1 else "<f", message, at)[0], at + (8 if kind == 1 else 4)
        yield key >> 3, value
    assert at == len(message)


def main() -> None:
    with open(sys.argv[1], "rb") as file:
        events = [list(fields(record)) for record in records(file.read())]
    assert dict(events[0])[3] == b"brain.Event:2", events[0]
    for event in events[1:]:
        known = dict(event)
        step, time = known.get(2, 0), known[1]
        if 7 in known:
            print(json.dumps({"step": step, "time": time, "session": dict(fields(known[7]))[1]}))
        for number, value in fields(known.get(5, b"")):
            assert number == 1, number
            scalar = dict(fields(value))
            print(json.dumps({"step": step, "time": time, "tag": scalar[1].decode(), "value": scalar[2]}))


main()
