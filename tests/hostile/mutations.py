"""Ways to make a file hostile. Each has a name, a family, and a function that changes a good file or its bytes."""

import io
import json
import os
import random
import socket
import struct
import warnings
import zipfile

# ------------------------------------------------------------------------------------------------- bytes of any file

def flipped(data, at):
    changed = bytearray(data)
    changed[at] ^= 0x10
    return bytes(changed)


BYTES = [  # Each entry is (what, family, bytes -> bytes)
    ("empty", "cut", lambda data: b""),
    ("one byte", "cut", lambda data: data[:1]),
    ("cut in its first bytes", "cut", lambda data: data[:9]),
    ("cut to half", "cut", lambda data: data[:len(data) // 2]),
    ("cut by its last byte that is no blank", "cut", lambda data: data.rstrip(b"\n ")[:-1]),
    ("a second copy behind it", "longer", lambda data: data + data),
    ("bytes behind it", "longer", lambda data: data + b"\x00tail"),
    ("its first bit flipped", "flipped", lambda data: flipped(data, 0)),
    ("a bit of the head flipped", "flipped", lambda data: flipped(data, min(40, len(data) - 1))),
    ("a bit of its middle flipped", "flipped", lambda data: flipped(data, len(data) // 2)),
    ("a bit of its end flipped", "flipped", lambda data: flipped(data, len(data) - 1)),
    ("zeros", "noise", lambda data: bytes(len(data))),
    ("ones", "noise", lambda data: b"\xff" * len(data)),
    ("random bytes", "noise", lambda data: random.Random(1).randbytes(len(data))),
    ("its head is random", "noise", lambda data: random.Random(2).randbytes(min(64, len(data))) + data[64:]),
    ("its halves exchanged", "noise", lambda data: data[len(data) // 2:] + data[:len(data) // 2]),
    ("a page of zeros in it", "noise", lambda data: data[:len(data) // 3] + bytes(4096) + data[len(data) // 3:]),
    ("text of HTML", "other", lambda data: b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>\n"),
    ("a pointer of Git LFS", "other", lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 12345\n"),
    ("a zip archive", "other", lambda data: zip_of({"a.txt": b"a" * 100})),
    ("a pickle that calls os.system", "other", lambda data: b"cposix\nsystem\n(S'touch pwned'\ntR."),
    ("an ELF program", "other", lambda data: b"\x7fELF\x02\x01\x01" + bytes(57)),
]

# --------------------------------------------------------------------------------------- what lies in place of a file

def replaced(make):
    def prepare(path):
        if path.is_dir() and not path.is_symlink():
            os.rename(path, str(path) + ".away")
        else:
            path.unlink(missing_ok=True)
        make(path)
    return prepare


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as one:
        folder, here = os.open(path.parent, os.O_RDONLY), os.getcwd()
        os.fchdir(folder)  # the path of a socket must be short
        one.bind(path.name)
        os.chdir(here)
        os.close(folder)


def make_sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def make_sparse_behind(path):
    with open(path, "r+b") as file:
        file.truncate(1 << 40)


def make_device(path):
    os.mknod(path, 0o666 | 0o020000, os.makedev(1, 5))  # /dev/zero, if the user may make a device


IN_PLACE = [  # Each entry is (what, family, path -> None); no links, which have a table of their own
    ("a folder", "in place", replaced(lambda path: path.mkdir())),
    ("a pipe that nobody writes", "in place", replaced(os.mkfifo)),
    ("a socket", "in place", replaced(make_socket)),
    ("nothing", "in place", replaced(lambda path: None)),
    ("a terabyte of nothing", "huge", replaced(make_sparse)),
    ("a terabyte behind it", "huge", make_sparse_behind),
]


def outside_folder(path):
    """Returns the folder `outside`, which lies beside the folder of the case."""
    return next(parent for parent in path.parents if parent.name == "inside").parent / "outside"


def outside_of(path):
    """Returns the path of this file's copy in the folder `outside`."""
    outside = outside_folder(path)
    return outside / path.relative_to(outside.parent / "inside")


LINKS = [  # Each entry is (what, family, path -> None)
    ("a link to itself", "loop", replaced(lambda path: path.symlink_to(path.name))),
    ("a link to a link to it", "loop", replaced(lambda path: (path.symlink_to(path.name + ".2"), path.with_name(path.name + ".2").symlink_to(path.name)))),
    ("a link to nowhere", "dangling", replaced(lambda path: path.symlink_to("nowhere"))),
    ("a link to a copy outside", "link", replaced(lambda path: path.symlink_to(os.path.relpath(outside_of(path), path.parent)))),
    ("an absolute link to a copy outside", "link", replaced(lambda path: path.symlink_to(outside_of(path)))),
    ("a link to a chain of links outside", "link", replaced(lambda path: _chain(path))),
    ("a link to an endless device", "device", replaced(lambda path: path.symlink_to("/dev/zero"))),
    ("a link to a device without an end of waiting", "device", replaced(lambda path: path.symlink_to("/dev/tty"))),
    ("a link to a pipe", "device", replaced(lambda path: (os.mkfifo(path.with_name(path.name + ".pipe")), path.symlink_to(path.name + ".pipe")))),
    ("a link to what /proc has of the process", "device", replaced(lambda path: path.symlink_to("/proc/self/mem"))),
    ("a link to a folder", "link", replaced(lambda path: path.symlink_to("scratch"))),
]


def _chain(path):
    first = path.with_name(path.name + ".first")
    first.symlink_to(os.path.relpath(outside_of(path), path.parent))
    path.symlink_to(first.name)


# -------------------------------------------------------------------------------------------------------------- JSON

def json_with(change):
    """Returns a mutation that reads the text as JSON and writes it again. `change` returns a new value, or changes the
    value in place."""
    def apply(data):
        value = json.loads(data)
        changed = change(value)
        return json.dumps(value if changed is None else changed).encode()
    return apply


def nested(depth):
    return b"[" * depth + b"]" * depth


JSON = [
    ("a list", "type", lambda data: b"[" + data + b"]"),
    ("null", "type", lambda data: b"null"),
    ("a number", "type", lambda data: b"1e999"),
    ("two objects", "longer", lambda data: data + data),
    ("a byte order mark before it", "mark", lambda data: b"\xef\xbb\xbf" + data),
    ("in UTF-16", "text", lambda data: data.decode(errors="replace").encode("utf-16")),
    ("bytes that are no UTF-8 in a name", "text", lambda data: data.replace(b'"', b'"\xff\xfe', 1)),
    ("a zero byte in a name", "text", lambda data: data.replace(b'"', b'"\x00', 1)),
    ("control characters in a name", "unknown keys", lambda data: data.replace(b'"', b'"\\u001b[2J\\u0000', 1)),
    ("a lone surrogate", "text", lambda data: data.replace(b'"', b'"\\ud800', 1)),
    ("a million brackets", "nested", lambda data: nested(500_000)),
    ("a value nested deep", "nested", lambda data: data[:-1].rstrip().removesuffix(b"}") + b', "x": ' + nested(2000) + b"}"),
    ("objects nested deep", "nested", lambda data: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    ("all keys twice", "twice", lambda data: data.strip()[:-1] + b"," + data.strip()[1:]),
    ("a comma at its end", "text", lambda data: data.strip()[:-1] + b",}"),
    ("a key of a megabyte", "unknown keys", lambda data: data.strip()[:-1] + b', "' + b"k" * (1 << 20) + b'": 1}'),
    ("a hundred thousand keys", "unknown keys", lambda data: data.strip()[:-1] + b"".join(b', "k%d": %d' % (i, i) for i in range(100_000)) + b"}"),
    ("a number of a million digits", "number", lambda data: data.strip()[:-1] + b', "x": ' + b"9" * 1_000_000 + b"}"),
    ("NaN", "number", lambda data: data.strip()[:-1] + b', "x": NaN}'),
]

WRONG = [None, True, -1, 0, 1 << 63, 1 << 64, 1e308, 0.5, "", "\x00", "../outside/secret", [], [[]], {}, {"a": {"a": 1}}]


def places_in(value, path=()):
    """Yields the paths of all values of a document."""
    yield path
    for key, below in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places_in(below, (*path, key))


def with_value(document, path, value):
    changed = json.loads(json.dumps(document))
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return changed


def wrong_values(document, count, seed):
    """Yields (text, changed document). Values of all kinds are put at places all over the document, in an order that
    the seed draws."""
    rng = random.Random(seed)
    paths = [path for path in places_in(document) if path]
    rng.shuffle(paths)
    values = WRONG * (count // len(WRONG) + 1)
    rng.shuffle(values)
    for i in range(count):
        path, value = paths[i % len(paths)], values[i]
        pointer = "/" + "/".join(map(str, path))
        yield f"{pointer} is {json.dumps(value)}", with_value(document, path, value)


# ------------------------------------------------------------------------------------------------------- safetensors

def packed(header, body, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def tensors_with(change):
    """Returns a mutation of the header and the data of a safetensors file."""
    def apply(data):
        size = struct.unpack("<Q", data[:8])[0]
        header, body = json.loads(data[8:8 + size]), data[8 + size:]
        changed = change(header, body)
        return packed(*changed) if isinstance(changed, tuple) else packed(header, body)
    return apply


def first(header):
    return next(entry for name, entry in header.items() if name != "__metadata__")


def set_first(**values):
    return tensors_with(lambda header, body: first(header).update(values))


def overlapping(header, body):
    names = [name for name in header if name != "__metadata__"]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]


TENSORS = [
    ("a header of 2^64 - 1 bytes", "lying length", lambda data: b"\xff" * 8 + data[8:]),
    ("a header of 2^63 bytes", "lying length", lambda data: struct.pack("<Q", 1 << 63) + data[8:]),
    ("a header of as much as a hundred megabytes", "lying length", lambda data: struct.pack("<Q", 100_000_000) + data[8:]),
    ("a header of nothing", "lying length", lambda data: struct.pack("<Q", 0) + data[8:]),
    ("a header one byte too short", "lying length", lambda data: struct.pack("<Q", struct.unpack("<Q", data[:8])[0] - 1) + data[8:]),
    ("offsets beyond the end", "lying length", set_first(data_offsets=[0, 1 << 62])),
    ("offsets below zero", "lying length", set_first(data_offsets=[-8, 8])),
    ("offsets that end before they begin", "lying length", set_first(data_offsets=[64, 0])),
    ("offsets of 2^64", "lying length", set_first(data_offsets=[0, 1 << 64])),
    ("a shape whose product overflows", "lying length", set_first(shape=[1 << 32, 1 << 32])),
    ("a shape below zero", "lying length", set_first(shape=[-256, -16])),
    ("a shape of a thousand dimensions", "lying length", set_first(shape=[1] * 1000)),
    ("a shape with a zero", "lying length", set_first(shape=[0, 16])),
    ("a type that there is not", "type", set_first(dtype="F128")),
    ("another type of the same size", "type", set_first(dtype="I32")),
    ("two tensors over the same bytes", "lying length", tensors_with(overlapping)),
    ("metadata that is no text", "type", tensors_with(lambda header, body: header.update(__metadata__={"a": [1]}))),
    ("a header of a list", "type", tensors_with(lambda header, body: (b"[]", body))),
    ("a header nested deep", "nested", tensors_with(lambda header, body: (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, body))),
    ("a million tensors of nothing", "long", tensors_with(lambda header, body: (
        {f"t{i}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for i in range(300_000)}, b""))),
    ("a name of a megabyte", "long", tensors_with(lambda header, body: header.update({"n" * (1 << 20): {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}))),
    ("infinite values", "values", lambda data: data[:-64] + struct.pack("<16f", *[float("inf")] * 16)),
]

# ---------------------------------------------------------------------------------------------------- torch.save's zip

def zip_of(entries, compression=zipfile.ZIP_STORED):
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", compression) as archive:
        warnings.simplefilter("ignore")  # this hides warnings about repeated names
        for name, content in entries.items() if isinstance(entries, dict) else entries:
            archive.writestr(name, content)
    return file.getvalue()


def archive_with(change):
    """Returns a mutation of an archive, given as a dictionary from names to contents. `change` returns a new dictionary, or changes it in
    place."""
    def apply(data):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        changed = change(entries)
        return zip_of(entries if changed is None else changed)
    return apply


def pickle_of(new):
    """Returns a mutation that replaces the pickle of an archive. `new` gets the good pickle."""
    def change(entries):
        name = next(name for name in entries if name.endswith("data.pkl"))
        entries[name] = new(entries[name])
    return archive_with(change)


def storages_cut(entries):
    for name in entries:
        if "/data/" in name:
            entries[name] = entries[name][:len(entries[name]) // 2]


def without_storages(entries):
    return {name: content for name, content in entries.items() if "/data/" not in name}


def lying_directory(data, offset, form, value):
    """Changes a field in the first entry of the central directory."""
    at = data.index(b"PK\x01\x02") + offset
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def lying_end(data, offset, form, value):
    at = data.rindex(b"PK\x05\x06") + offset
    changed = bytearray(data)
    struct.pack_into(form, changed, at, value)
    return bytes(changed)


def bomb(data):
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("/data/0"))
    entries[name] = bytes(1 << 30)
    return zip_of(entries, zipfile.ZIP_DEFLATED)


ARCHIVE = [
    ("storages cut to half", "lying length", archive_with(storages_cut)),
    ("no storages", "cut", archive_with(without_storages)),
    ("no pickle", "cut", archive_with(lambda entries: {name: content for name, content in entries.items() if not name.endswith(".pkl")})),
    ("names that lead outside", "names", archive_with(lambda entries: {"../outside/" + name: content for name, content in entries.items()})),
    ("absolute names", "names", archive_with(lambda entries: {"/" + name: content for name, content in entries.items()})),
    ("all entries twice", "twice", archive_with(lambda entries: [*entries.items(), *entries.items()])),
    ("a hundred thousand entries", "long", archive_with(lambda entries: {**entries, **{f"archive/data/x{i}": b"" for i in range(60_000)}})),
    ("a storage of a gigabyte of zeros, packed", "huge", bomb),
    ("a size of 4 GiB in the directory", "lying length", lambda data: lying_directory(data, 24, "<I", 0xFFFFFFF0)),
    ("an offset behind the file in the directory", "lying length", lambda data: lying_directory(data, 42, "<I", 0xFFFFFF00)),
    ("a directory behind the file", "lying directory", lambda data: lying_end(data, 16, "<I", 0xFFFFFF00)),
    ("65534 entries in the directory", "lying directory", lambda data: lying_end(data, 10, "<H", 65534)),
    ("its pickle calls os.system", "pickle", pickle_of(lambda good: b"\x80\x02cposix\nsystem\nX\x0b\x00\x00\x00touch pwnedq\x00\x85R.")),
    ("a pickle that builds an object", "pickle", pickle_of(lambda good: b"\x80\x02csubprocess\nPopen\n)R}b.")),
    ("a pickle of nothing", "pickle", pickle_of(lambda good: b"\x80\x02N.")),
    ("a pickle cut to half", "cut", pickle_of(lambda good: good[:len(good) // 2])),
    ("a pickle without an end", "cut", pickle_of(lambda good: good[:-1])),
    ("a pickle of a later protocol", "protocol", pickle_of(lambda good: b"\x80\x7f" + good[2:])),
    ("a pickle with an unknown instruction", "pickle", pickle_of(lambda good: good[:2] + b"\xff" + good[2:])),
    ("a pickle that takes from an empty stack", "pickle", pickle_of(lambda good: b"\x80\x02" + b"u" * 100 + b".")),
    ("a pickle nested deep", "nested", pickle_of(lambda good: b"\x80\x02" + b"(" * 200_000 + b"t" * 200_000 + b".")),
    ("a pickle that names what it never kept", "pickle", pickle_of(lambda good: b"\x80\x02j\xff\xff\xff\x7f.")),
    ("a text of 2 GiB in the pickle", "lying length", pickle_of(lambda good: b"\x80\x02X\xff\xff\xff\x7fabc.")),
    ("a number of 2 GiB in the pickle", "lying length", pickle_of(lambda good: b"\x80\x02\x8b\xff\xff\xff\x7fabc.")),
    ("a dictionary in itself", "loop", pickle_of(lambda good: b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01h\x00s.")),
]

# ------------------------------------------------------------------------------------------------------------- tokens

def patched(form, offset, value):
    def apply(data):
        changed = bytearray(data)
        struct.pack_into(form, changed, offset, value)
        return bytes(changed)
    return apply


LLMC = [
    ("another magic number", "type", patched("<i", 0, 20240519)),
    ("a version to come", "type", patched("<i", 4, 99)),
    ("tokens below zero", "lying length", patched("<i", 8, -1)),
    ("two billion tokens", "lying length", patched("<i", 8, 0x7FFFFFFF)),
    ("no tokens", "lying length", patched("<i", 8, 0)),
    ("one token fewer than it has", "lying length", lambda data: patched("<i", 8, (len(data) - 1024) // 2 - 1)(data)),
    ("a token outside of the vocabulary", "values", patched("<H", 1024 + 40, 65535)),
    ("an odd byte at its end", "longer", lambda data: data + b"\x00"),
    ("other byte order", "type", lambda data: data[:1024][::-1] + data[1024:]),
]

MEGATRON = [
    ("another magic text", "type", lambda data: b"MMIDIDY" + data[7:]),
    ("a version to come", "type", patched("<Q", 9, 2)),
    ("a type of tokens that there is not", "type", patched("<B", 17, 99)),
    ("2^63 sequences", "lying length", patched("<Q", 18, 1 << 63)),
    ("2^61 sequences", "lying length", patched("<Q", 18, 1 << 61)),
    ("no sequences", "lying length", patched("<Q", 18, 0)),
    ("2^63 documents", "lying length", patched("<Q", 26, 1 << 63)),
    ("no documents", "lying length", patched("<Q", 26, 0)),
    ("a sequence of two billion tokens", "lying length", patched("<i", 34, 0x7FFFFFFF)),
    ("a sequence of less than nothing", "lying length", patched("<i", 34, -1)),
    ("a place before the file", "lying length", lambda data: patched("<q", len(data) - 24 if len(data) >= 58 else 38, -8)(data)),
]
