"""Makes cases of limits of the process and of full devices. A command may succeed, or end in an error that names the
limit or the device. It may never end by a signal."""

from case import CONFIG, CREATE, IO, MIB, RESOURCE, Case
from seeds import DURABLE, OFFLOAD, PLAN, SAMPLE, TOKENIZE, TRAIN

SAVE = [*TRAIN, "--checkpoint-dir", "disk/new"]
VERIFY = ["checkpoint", "verify", "saved"]
WRITERS = [("--metrics", [*TRAIN, "--metrics", "disk/out"]), ("--save-weights", [*TRAIN, "--save-weights", "disk/out"]), ("--checkpoint-dir", SAVE),
           ("--trace", [*TRAIN, "--trace", "disk/out"]), ("--profile", [*TRAIN, "--profile", "disk/out"]), ("--export-hf", [*TRAIN, "--export-hf", "disk/out"]),
           ("--tensorboard", [*TRAIN, "--tensorboard", "disk/out"]), ("offload", OFFLOAD), ("durable", DURABLE),
           ("tokenize", [*TOKENIZE, "--out", "disk/out"]), ("reshard", ["checkpoint", "reshard", "saved", "disk/out", "--files", "2"]),
           ("export", ["checkpoint", "export", "saved", "disk/out"])]
READERS = [("plan", PLAN), ("train", TRAIN), ("sample", SAMPLE), ("verify", VERIFY), ("tokenize", [*TOKENIZE, "--out", "disk/out"]), ("save", SAVE), ("offload", OFFLOAD),
           ("durable", DURABLE)]
PRINTERS = [("plan", PLAN), ("plan --json", [*PLAN, "--json"]), ("checkpoint ls", ["checkpoint", "ls", "saved"]), ("checkpoint show", ["checkpoint", "show", "saved"]),
            ("checkpoint show --json", ["checkpoint", "show", "--json", "saved"]), ("checkpoint verify", VERIFY), ("checkpoint diff", ["checkpoint", "diff", "saved", "saved"]),
            ("sample", SAMPLE), ("train", TRAIN), ("help", ["train", "--help"]), ("version", ["--version"])]


def make_disk(folder):
    (folder / "disk").mkdir()


def row(place, what, kind, words, codes, names, **more):
    return Case("limits", place, what, kind, words, codes, make_disk, names, ("disk/*", "saved*", "durable*", "scratch*"), **more)


def limit_cases():
    for name, words in READERS:
        for count in (3, 4, 6, 10, 20):
            yield row(f"descriptors of {name}", f"{count} of them", "descriptors", words, (RESOURCE, IO, 0), ("ulimit -n", "Too many open files"),
                      limits={"descriptors": count})
    for name, words in WRITERS:
        for bytes_ in (0, 1024, 20_000):
            yield row(f"file size of {name}", f"{bytes_} bytes", "file size", words, (IO, RESOURCE, 0), ("ulimit -f", "File too large"),
                      limits={"file size": bytes_})
    for name, words in READERS:
        for mib in (4, 8, 64):  # with no memory at all, the kernel cannot enlarge the stack and ends any program
            yield row(f"address space of {name}", f"{mib} MiB more", "address space", words, (RESOURCE, IO, 0), ("memory", "ulimit -v"),
                      limits={"address space": mib * MIB})
    for name, words in (("train", TRAIN), ("save", SAVE), ("offload", OFFLOAD), ("durable", DURABLE), ("tokenize", READERS[4][1])):
        for threads in ("1", "4"):
            yield row(f"processes of {name}", f"none but itself, {threads} threads", "processes", words, (RESOURCE, IO, 0), ("ulimit -u", "thread"),
                      limits={"processes": 0}, as_nobody=True, environment={"OMP_NUM_THREADS": threads})
    for name, words in (("offload", OFFLOAD), ("durable", DURABLE)):
        for bytes_ in (0, 65536):
            yield row(f"locked memory of {name}", f"{bytes_} bytes", "locked memory", words, (RESOURCE, IO, 0), ("ulimit -l",), limits={"locked memory": bytes_},
                      as_nobody=True)
    for name, words in WRITERS:
        if name not in ("offload", "durable"):
            for size in (4096, 32768):
                yield row(f"disk of {name}", f"{size} bytes", "full disk", words, (IO, CREATE, CONFIG, 0), ("disk", "No space"), disk=size)
    for name, words in PRINTERS:
        yield row(f"output of {name}", "a full device", "full device", words, (IO,), ("standard output",), stdout="/dev/full")
