"""Puts links, pipes and devices in the place of input files, of output files, and of folders on the path to input
files."""

import os

import mutations
from case import CONFIG, CORRUPT, CREATE, DENIED, IO, MISSING, RESOURCE, UNAVAILABLE, USAGE, Case
from files import PLACES, STEP, in_place
from seeds import DURABLE, OFFLOAD, TOKENIZE, TRAIN

READ_CODES = (CORRUPT, MISSING, CONFIG, CREATE, IO, RESOURCE, DENIED)
WRITE_CODES = (CREATE, USAGE, IO, DENIED, CORRUPT, RESOURCE, UNAVAILABLE)

# Files that a command line names. A link in their place is allowed, since the user made it. Other files are found below
# a folder, where no link is followed.
NAMED = {"strategy.json", "model.json", "weights.safetensors", "weights.pt", "tokenizer.json", "tokens.llmc", "text", "profile.json", "links.json",
         "corpus.idx", "corpus.bin"}


def inputs():
    for turn, place in enumerate(PLACES):
        for number, (what, kind, change) in enumerate(mutations.LINKS):
            if (number + turn) % 2 and kind in ("loop", "device", "dangling"):
                continue  # each link of these kinds is tried at every second place
            named = place.path in NAMED
            codes = READ_CODES if kind != "link" or not named else (*READ_CODES, 0)
            if kind in place.harmless or "in place" in place.harmless:
                codes = (*codes, 0)
            yield Case("links", place.path, what, kind, place.words, codes, in_place(place.path, change), place.names,
                       (*place.writes, place.path + ".*"), opens_outside=named and kind == "link", **place.more)


def to_outside(path):
    """Returns a function that replaces a part of a path by a link to that part's copy outside."""
    return in_place(path, mutations.replaced(lambda at: at.symlink_to(os.path.relpath(mutations.outside_of(at), at.parent))))


def on_the_way():
    """Yields cases in which a folder on the way to a file is a link."""
    def row(path, words, codes, names=(), writes=()):
        return Case("links", path, "a folder that is a link to its copy outside", "way", words, codes, to_outside(path), names, (*writes, path + ".away*"))
    resume = [*TRAIN, "--checkpoint-dir", "saved", "--steps", "3"]
    for words in (["checkpoint", "verify", "saved"], ["checkpoint", "show", "saved"], ["checkpoint", "ls", "saved"], ["checkpoint", "export", "saved", "out"],
                  ["checkpoint", "reshard", "saved", "out", "--files", "2"], ["checkpoint", "diff", "saved", "saved"], resume):
        codes = (CORRUPT, MISSING, CREATE, 0) if words[1] == "ls" else (CORRUPT, MISSING, CREATE)
        yield row(STEP, words, codes, ("step-000000000002",), ("saved*",))
    yield Case("links", "saved", "the folder that is named is a link", "way", ["checkpoint", "verify", "saved"], (0,), to_outside("saved"),
               writes=("saved*",), opens_outside=True)
    yield Case("links", "hf", "the folder that is named is a link", "way", ["sample", "--model", "hf", "--tokens", "2"], (0,), to_outside("hf"),
               writes=("hf*",), opens_outside=True)


OUTPUTS = [("--metrics", TRAIN, "out"), ("--trace", TRAIN, "out"), ("--save-weights", TRAIN, "out"), ("--profile", TRAIN, "out"), ("--out", TRAIN, "out"),
           ("--export-hf", TRAIN, "out"), ("--tensorboard", TRAIN, "out"), ("--checkpoint-dir", TRAIN, "out"), ("--out", TOKENIZE, "out.idx"),
           ("--out", TOKENIZE, "out.bin")]


def outputs():
    """Yields cases in which something exists at the path of an output. The command may change what exists there only
    with --overwrite. It may never change the target of a link."""
    def made(path):
        path.write_text("results")
    ways = [("a link to a file outside", "link", lambda at: at.symlink_to(os.path.relpath(mutations.outside_of(at.with_name("text")), at.parent))),
            ("a link to a name outside that is free", "dangling", lambda at: at.symlink_to(os.path.relpath(mutations.outside_of(at.with_name("free")), at.parent))),
            ("a link to itself", "loop", lambda at: at.symlink_to(at.name)),
            ("a hard link of a file outside", "hard link", lambda at: os.link(mutations.outside_of(at.with_name("text")), at)),
            ("a pipe that nobody reads", "device", os.mkfifo),
            ("a socket", "device", mutations.make_socket),
            ("a link to a full device", "device", lambda at: at.symlink_to("/dev/full")),
            ("a file", "in place", made)]
    for turn, (option, command, name) in enumerate(OUTPUTS):
        for number, (what, kind, make) in enumerate(ways):
            for more in ([], ["--overwrite"]):
                if (number + turn + len(more)) % 2 or ("--checkpoint-dir" in option and more):
                    continue
                words = [*command, option, name.partition(".")[0], *more]
                # A folder that a user names may be a link. If a file may be overwritten, it is overwritten.
                codes = WRITE_CODES
                if option in ("--checkpoint-dir", "--tensorboard", "--export-hf", "--out") or more:
                    codes = (*codes, 0)
                yield Case("links", f"{option} {name}", what + (", to be overwritten" if more else ""), kind, words, codes,
                           in_place(name, make), (name.partition(".")[0], option), ("out*",) if more else ("out/*", "out.idx", "out.bin", "out.idx.*", "out.bin.*"))


def partials():
    """Yields cases in which something exists at the path of a partial output."""
    for option, command, name in OUTPUTS:
        if option in ("--checkpoint-dir", "--tensorboard", "--export-hf") or (option == "--out" and command is TRAIN):
            continue
        for what, kind, make in [HARD_LINK, ("a link to a file outside", "link", lambda at: at.symlink_to(mutations.outside_folder(at) / "text")), ("a pipe", "device", os.mkfifo)]:
            words = [*command, option, name.partition(".")[0], "--overwrite"]
            yield Case("links", f"{option} {name}.partial", what, kind, words, (*WRITE_CODES, 0), in_place(f"{name}.partial", make), ("out", option), ("out*",))


HARD_LINK = ("a hard link of a file outside", "hard link", mutations.replaced(lambda at: os.link(mutations.outside_folder(at) / "text", at)))


def inside_folders():
    """Yields cases in which something unexpected exists in a folder that a command uses for its own files."""
    save = [*TRAIN, "--checkpoint-dir", "saved", "--steps", "3"]
    for path, words, writes in [("saved/lock", save, ("saved*",)), ("saved/run.lock", save, ("saved*",)), ("saved/latest", save, ("saved*",)),
                                ("durable/rank-00000.lock", DURABLE, ("durable*", "scratch*")),
                                ("durable/rank-00000.commit-0", DURABLE, ("durable*", "scratch*")), ("scratch", OFFLOAD, ("scratch*",))]:
        for what, kind, change in [*mutations.LINKS[:6], *mutations.IN_PLACE[:3], HARD_LINK]:
            codes = (*READ_CODES, *WRITE_CODES, 0)
            yield Case("links", path, what, kind, words, codes, in_place(path, change), (path.rpartition("/")[2], path.partition("/")[0]), (*writes, path + ".*"),
                       opens_outside=path == "scratch" or kind == "hard link")
    for step in ("step-000000000003", ".tmp-step-000000000003"):
        for what, make in [("a link to a folder outside", lambda at: at.symlink_to("../../outside/saved")), ("a file", lambda at: at.write_text("x")), ("a pipe", os.mkfifo)]:
            yield Case("links", f"saved/{step}", what, "in place", save, (*WRITE_CODES, 0), in_place(f"saved/{step}", make), ("saved",), ("saved*",))


def link_cases():
    yield from inputs()
    yield from on_the_way()
    yield from outputs()
    yield from partials()
    yield from inside_folders()
