"""Makes cases of hostile files. Each place is a file that a command reads. It gets all ways of mutations.py that belong
to the file's format, and some of those that damage the bytes of any file."""

import json

import mutations
from case import CONFIG, CORRUPT, CREATE, IO, MIB, MISSING, RESOURCE, USAGE, Case
from seeds import DURABLE, PLAN, SAMPLE, TOKENIZE, TRAIN

READ = ["train", "--model", "hf", *TRAIN[3:]]
STEP = "saved/step-000000000002"


class Place:
    """A file, a command that reads it, and the exit codes for a damaged file."""

    def __init__(self, path, words, codes, forms, names=None, absent=(MISSING,), bytes_of_it=8, harmless=(), seed_of=None, writes=(), **more):
        self.path, self.words, self.codes, self.forms = path, words, codes, forms
        self.names = names or (path.rpartition("/")[2],)
        self.absent = absent  # exit codes where the file is missing, or is no file
        self.bytes_of_it = bytes_of_it  # number of ways to damage bytes that fit any file
        self.harmless = harmless  # families of mutations that may go unnoticed: the command then succeeds
        self.writes, self.more = writes, more


# No command can notice changed numbers among a model's weights or a file's values, or a changed letter of a text.
PLACES = [
    Place("strategy.json", PLAN, (CONFIG,), ["json"]),
    Place("model.json", PLAN, (CONFIG,), ["json"]),
    Place("hf/config.json", READ, (CONFIG, CORRUPT), ["json"], harmless=("unknown keys",)),
    Place("weights.safetensors", [*SAMPLE, "--weights", "weights.safetensors"], (CORRUPT,), ["tensors"], harmless=("values", "flipped"), names=("weights",), bytes_of_it=12),
    Place("hf/model.safetensors", ["sample", "--model", "hf", "--tokens", "2"], (CORRUPT,), [], harmless=("flipped",), bytes_of_it=6),
    Place("sharded/model.safetensors.index.json", ["sample", "--model", "sharded", "--tokens", "2"], (CORRUPT,), ["json"],
          names=("index.json", "model.safetensors", "model-0000"), harmless=("unknown keys",)),
    Place("weights.pt", SAMPLE, (CORRUPT,), ["archive"], harmless=("flipped", "longer", "twice", "names", "long", "noise", "lying directory", "protocol"), bytes_of_it=12),
    Place("tokenizer.json", TOKENIZE, (CORRUPT,), ["json"], harmless=("unknown keys",), writes=("tokens*",)),
    Place("tokens.llmc", [*TRAIN, "--data", "tokens.llmc", "--data-format", "llmc"], (CORRUPT,), ["llmc"], harmless=("flipped", "noise", "longer", "cut", "lying length", "values")),
    Place("corpus.idx", [*TRAIN, "--data", "corpus", "--data-format", "megatron"], (CORRUPT,), ["megatron"], harmless=("flipped", "noise"), names=("corpus",)),
    Place("corpus.bin", [*TRAIN, "--data", "corpus", "--data-format", "megatron"], (CORRUPT,), [], harmless=("flipped", "noise", "longer"), names=("corpus",), bytes_of_it=5),
    Place("text", TRAIN, (CORRUPT,), [], harmless=("cut", "longer", "flipped", "noise", "other", "huge"), bytes_of_it=4, absent=(MISSING, CORRUPT)),
    Place(f"{STEP}/manifest.json", ["checkpoint", "verify", "saved"], (CORRUPT,), ["json"], names=("manifest.json", "saved"), absent=(MISSING, CORRUPT)),
    Place(f"{STEP}/rank-00000.safetensors", ["checkpoint", "verify", "saved"], (CORRUPT,), ["tensors"], bytes_of_it=12, absent=(MISSING, CORRUPT)),
    Place(f"{STEP}/rank-00000.safetensors", [*TRAIN, "--checkpoint-dir", "saved", "--steps", "3"], (CORRUPT,), [], bytes_of_it=6, absent=(MISSING, CORRUPT), writes=("saved*",)),
    Place("saved/latest", ["checkpoint", "show", "saved"], (CORRUPT, MISSING), ["latest"], names=("latest", "saved"), bytes_of_it=6, absent=(MISSING, CORRUPT)),
    Place("durable/rank-00000.commit-1", DURABLE, (CORRUPT,), [], harmless=("cut", "longer", "flipped", "noise", "other", "in place", "huge"), names=("commit-1", "durable"),
          absent=(CORRUPT, MISSING), writes=("durable*", "scratch*"), bytes_of_it=12),
    Place("durable/rank-00000.memory", DURABLE, (CORRUPT,), [], names=("durable",), absent=(CORRUPT, MISSING, CREATE), harmless=("longer", "flipped", "noise", "huge"), writes=("durable*", "scratch*"), bytes_of_it=6),
    Place("profile.json", [*PLAN, "--links", "links.json", "--profile", "profile.json"], (CORRUPT,), ["json"], bytes_of_it=4),
    Place("links.json", [*PLAN, "--links", "links.json", "--profile", "profile.json"], (CORRUPT,), [], bytes_of_it=6),
]

FORMS = {"json": mutations.JSON, "tensors": mutations.TENSORS, "archive": mutations.ARCHIVE, "llmc": mutations.LLMC, "megatron": mutations.MEGATRON,
         "latest": [("a name that leads outside", "names", lambda data: b"../outside/saved/step-000000000002\n"),
                    ("an absolute name", "names", lambda data: b"/etc/passwd\n"),
                    ("a name with a slash", "names", lambda data: b"step-000000000002/../step-000000000001\n"),
                    ("two names", "twice", lambda data: data + data),
                    ("a name with a zero byte", "names", lambda data: b"step-000000000002\x00\n"),
                    ("a name of a megabyte", "long", lambda data: b"s" * (1 << 20)),
                    ("a name with control characters", "names", lambda data: b"\x1b[2Jstep\n")]}
WRONG_VALUES = {"strategy.json": 14, "model.json": 12, "hf/config.json": 12, "sharded/model.safetensors.index.json": 8, "tokenizer.json": 8, "profile.json": 8, "links.json": 10,
                f"{STEP}/manifest.json": 0}


def changed(path, change):
    def prepare(folder):
        file = folder / path
        file.write_bytes(change(file.read_bytes()))
    return prepare


def in_place(path, change):
    return lambda folder: change(folder / path)


def case(place, what, kind, prepare, codes, group="files", **more):
    if kind == "long":
        more["memory"] = 512 * MIB  # the text of this file alone has tens of megabytes
    codes = (*codes, 0) if kind in (*place.harmless, "mark") else codes  # a mark of the byte order is no part of a text
    return Case(group, place.path, what, kind, place.words, codes, prepare, place.names, place.writes, **{**place.more, **more})


def some(table, count, turn):
    """Returns `count` entries of a table. Each `turn` gets other entries, so that every entry is used."""
    return [table[(turn + i * len(table) // count) % len(table)] for i in range(min(count, len(table)))]


def of_bytes(place, turn):
    for what, kind, change in some(mutations.BYTES, place.bytes_of_it, turn):
        yield case(place, what, kind, changed(place.path, change), place.codes)


def of_forms(place):
    for form in place.forms:
        for what, kind, change in FORMS[form]:
            yield case(place, what, kind, changed(place.path, change), place.codes)


def of_places(place):
    for what, kind, change in mutations.IN_PLACE:
        codes = (*place.absent, CORRUPT, *place.codes) if kind == "in place" else (*place.codes, RESOURCE, IO)
        yield case(place, what, kind, in_place(place.path, change), codes)


def of_values(place):
    """Makes as many cases as WRONG_VALUES says. Each case puts a wrong value at one place of the document. A key may
    happen to allow such a value, so exit code 0 is right, too."""
    def prepare_with(number):
        def prepare(folder):
            file = folder / place.path
            document = json.loads(file.read_text())
            _, wrong = list(mutations.wrong_values(document, number + 1, place.path))[number]
            file.write_text(json.dumps(wrong))
        return prepare
    for number in range(WRONG_VALUES.get(place.path, 0)):
        yield case(place, f"value {number} of its keys", "type", prepare_with(number), (*place.codes, 0, USAGE, MISSING, CONFIG))


def file_cases():
    for turn, place in enumerate(PLACES):
        yield from of_bytes(place, 5 * turn)
        yield from of_forms(place)
        yield from of_places(place)
        yield from of_values(place)
