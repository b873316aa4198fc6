"""Tests verdicts on safetensors files. Tessera's verdict must be that of the package `safetensors`, except for its own
bounds.

Usage: safetensors_verdicts_test.py CHECK

CHECK (check_safetensors.cc) reads names of files from stdin, and says "ok" or "no" for each. There are a few good files
and thousands of mutations of these files.
"""

import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from patience import patient  # noqa: E402

CHECK = sys.argv.pop(1) if len(sys.argv) > 1 else "check_safetensors"

try:
    import torch
    from safetensors import safe_open
    from safetensors.torch import save
except ImportError:
    safe_open = None


def packed(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def good_files():
    yield save({"a": torch.arange(6.).view(2, 3), "b": torch.ones(3, dtype=torch.bfloat16), "c": torch.tensor(True), "d": torch.empty(0, 4)})
    yield save({"w": torch.arange(4, dtype=torch.int64)}, metadata={"format": "pt", "note": "é"})
    yield packed({})
    yield packed({"x": {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}, "y": {"dtype": "U16", "shape": [], "data_offsets": [4, 6]}}, b"123456")
    yield packed({"x": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}, "z": {"dtype": "C64", "shape": [1], "data_offsets": [2, 10]}}, b"0123456789")


def mutations(good, rng):
    length = struct.unpack("<Q", good[:8])[0]
    header, data = good[8:8 + length], good[8 + length:]
    words = [b"0", b"1", b"7", b"-1", b"1.0", b"1e1", b"18446744073709551616", b"null", b"true", b"[]", b"{}", b"\"F32\"", b"\"I8\"", b"\"F7\"", b"\"__metadata__\"",
             b",", b":", b" ", b"\x00", b"\xff", b"\"a\"", b"[0,4]", b"}", b"]"]
    for _ in range(400):
        changed = bytearray(header)
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(changed) + 1)
            kind = rng.random()
            if kind < 0.3 and at < len(changed):
                changed[at] = rng.randrange(256)
            elif kind < 0.5:
                del changed[at:at + rng.randint(1, 6)]
            elif kind < 0.8:
                changed[at:at + rng.randint(0, 3)] = rng.choice(words)
            else:
                digits = [i for i, byte in enumerate(changed) if chr(byte).isdigit()]
                if digits:
                    changed[rng.choice(digits)] = ord(rng.choice("0123456789"))
        yield struct.pack("<Q", len(changed)) + bytes(changed) + data
    for _ in range(60):
        yield good[:rng.randrange(len(good) + 1)]
        yield good + bytes(rng.randrange(1, 9))
        yield struct.pack("<Q", max(0, length + rng.randint(-9, 9))) + good[8:]


def accepted_by_package(path):
    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
        return True
    except Exception:  # any exception counts as a refusal
        return False


def has_our_own_bounds(path):
    """Returns whether Tessera's own bounds refuse a file that the package accepts. Such a file has unknown members in a
    tensor's entry, a NUL in a name, or the same key twice."""
    whole = path.read_bytes()
    header = json.loads(whole[8:8 + struct.unpack("<Q", whole[:8])[0]], object_pairs_hook=list)
    for name, entry in header:
        if name == "__metadata__":
            keys = [key for key, _ in entry] if isinstance(entry, list) else []
        else:
            keys = [key for key, _ in entry]
            if sorted(keys) != ["data_offsets", "dtype", "shape"] or "\x00" in name:
                return True
        if len(set(keys)) != len(keys):
            return True
    return len({name for name, _ in header}) != len(header)


@unittest.skipIf(safe_open is None, "no safetensors. hint: scripts/setup --tests")
class Verdicts(unittest.TestCase):
    def test_verdicts_are_those_of_the_package(self):
        folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        rng = random.Random(4)
        paths = []
        for good in good_files():
            for bytes_of in (good, *mutations(good, rng)):
                paths.append(folder / f"{len(paths)}.safetensors")
                paths[-1].write_bytes(bytes_of)
        done = subprocess.run([CHECK], input="\n".join(map(str, paths)) + "\n", capture_output=True, text=True, timeout=patient(120), check=True)
        verdicts = done.stdout.split()
        self.assertEqual(len(verdicts), len(paths))
        accepted = 0
        for path, verdict in zip(paths, verdicts):
            wanted = accepted_by_package(path)
            accepted += wanted
            if (verdict == "ok") != wanted:
                self.assertTrue(wanted and has_our_own_bounds(path), f"{path.read_bytes()!r}: Tessera says {verdict}")
        self.assertGreater(accepted, 50)
        self.assertGreater(len(paths) - accepted, 1000)


if __name__ == "__main__":
    unittest.main()
