"""Odd inputs of the `tessera` command. Each row has an input and the result that the program must give.

A row runs in its own folder, which has `model.json`, `strategy.json`, `text`, `held_out`, `weights.pt` and the files
that the row adds. If an option is given twice, the last one counts, so rows append to a command line that works.
"""

import dataclasses
import json
import os
import stat
from typing import Callable, Optional

USAGE, CORRUPT, MISSING, UNAVAILABLE, RESOURCE, CREATE, IO, PEER, DENIED, CONFIG = 64, 65, 66, 69, 71, 73, 74, 75, 77, 78

MODEL = {"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 1, "width": 16, "heads": 2}
LLAMA = {"model": "llama", "vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "max_position_embeddings": 16}
STRATEGY = {"strategy": "FULL_SHARD", "units": {"classes": ["Block"]}, "comm": {"init_timeout_s": 2, "timeout_s": 10}}

TRAIN = ["train", "--model", "model.json", "--strategy", "strategy.json", "--data", "text", "--steps", "2", "--batch", "2"]
PLAN = ["plan", "--model", "model.json", "--strategy", "strategy.json", "--world-size", "2"]
SAMPLE = ["sample", "--model", "model.json", "--weights", "weights.pt", "--tokens", "2"]
LAUNCH = ["launch", "-n", "2"]


@dataclasses.dataclass
class Row:
    name: str
    command: list
    code: int
    says: list = dataclasses.field(default_factory=list)  # texts that stderr must contain, or stdout if the exit code is 0
    files: dict = dataclasses.field(default_factory=dict)  # maps names to text or bytes
    environment: dict = dataclasses.field(default_factory=dict)
    prepare: Optional[Callable] = None  # a function that is called with the folder
    keeps: list = dataclasses.field(default_factory=list)  # paths whose contents must be the same afterwards
    absent: list = dataclasses.field(default_factory=list)  # paths that must not exist afterwards
    as_nobody: bool = False  # if true, the row runs without root's rights, since permissions do not restrict root
    poor: bool = False  # the exit code is right, but the message has no hint


long = bool(os.environ.get("TESSERA_LONG_TESTS"))  # if false, some() takes half as many values
everything = False  # True tries all values with all keys; False tries a few with each key, in turn
_turn = 0


def some(values, count):
    """Returns the next `count` of the values with every call, or all values if `everything` is true."""
    global _turn
    values = list(values)
    count = count if long else (count + 1) // 2
    if everything or count >= len(values):
        return values
    _turn += count
    return [values[(_turn + i) % len(values)] for i in range(count)]


def all_rows():
    rows = [*commands(), *options(), *required(), *numbers(), *worlds(), *launches(), *input_files(), *model_contents(),
            *strategy_contents(), *data_contents(), *outputs(), *run_directories(), *evaluations(), *samples(), *hugging_face(),
            *launcher_variables(), *accepted()]
    names = [row.name for row in rows]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return rows


# ------------------------------------------------------------------------------------------------- the command line

def commands():
    meant = {"trian": "train", "Train": "train", "plna": "plan", "launc": "launch", "sampel": "sample", "doctr": "doctor",
             "schema1": "schema", "benhc": "bench", "tran": "train"}
    for word, wanted in meant.items():
        yield Row(f"command {word}", [word], USAGE, [f'has no command "{word}"', f'did you mean "{wanted}"?'])
    for word in ["help", "fly", "", "train train", "x" * 300, "тренировка", "\x1b[31m"]:
        yield Row(f"command {word[:12]!r}", [word], USAGE, ["has no command", "hint: known here: train"])
    yield Row("no command", [], USAGE, ["--help"])
    yield Row("import-config", ["import-config", "c.json"], USAGE, ["python -m tessera.import_config"])
    yield Row("report", ["report", "runs/a"], USAGE, ["python -m tessera.report"])
    yield Row("import-cofig", ["import-cofig", "c.json"], USAGE, ['did you mean "import-config"?'])
    yield Row("bench alone", ["bench"], USAGE, ["--help"])
    yield Row("bench colectives", ["bench", "colectives"], USAGE, ['did you mean "collectives"?'])
    yield Row("bench of nothing known", ["bench", "everything"], USAGE, ["`tessera bench` has no command"])
    for command in ["train", "plan", "sample", "doctor", "schema"]:
        yield Row(f"{command} with a stray word", [*{"train": TRAIN, "plan": PLAN, "sample": SAMPLE}.get(command, [command]),
                                                   "stray"], USAGE, ["stray", "--help"])


def options():
    slips = {"train": [("--step", "--steps"), ("--stratgy", "--strategy"), ("--sed", "--seed"), ("--metric", "--metrics"),
                       ("--save-weight", "--save-weights"), ("--log-evry", "--log-every"), ("--overwite", "--overwrite"),
                       ("--eval-evry", "--eval-every"), ("--evaldata", "--eval-data"), ("--Batch", "--batch")],
             "plan": [("--worldsize", "--world-size"), ("--host", "--hosts"), ("--jason", "--json")],
             "sample": [("--weigths", "--weights"), ("--token", "--tokens"), ("--topk", "--top-k")],
             "bench collectives": [("--jsn", "--json"), ("--quik", "--quick"), ("--rank", "--ranks")]}
    for command, pairs in slips.items():
        for given, meant in some(pairs, 4 if command == "train" else 1):
            yield Row(f"{command} {given}", [*command.split(), f"{given}=3"], USAGE,
                      [f"has no option {given}", f'did you mean "{meant}"?'])
    yield Row("train --wibble", [*TRAIN, "--wibble"], USAGE, ["has no option --wibble"])
    yield Row("launch --rankz", ["launch", "--rankz", "2", "--", "/bin/true"], USAGE, ["has no option --rankz", "hint:"])
    yield Row("train -x", [*TRAIN, "-x"], USAGE, ["-x", "--help"])
    yield Row("train --data-format hdf5", [*TRAIN, "--data-format", "hdf5"], USAGE, ["hdf5", "auto, text, llmc or megatron"])
    yield Row("train --show losses", [*TRAIN, "--show", "losses"], USAGE, ["--show", "losses", "share"])
    yield Row("train --tail keep", [*TRAIN, "--tail", "keep"], USAGE, ["--tail", "keep"])
    yield Row("bench --transport tcp", ["bench", "collectives", "--transport", "tcp"], USAGE, ["tcp", "host,gloo"])


def without(command, option):
    at = command.index(option)
    return command[:at] + command[at + 2:]


def required():
    for command in [TRAIN, PLAN, SAMPLE]:
        for option in some([word for word in command if word.startswith("--") and word != "--tokens"], 2):
            yield Row(f"{command[0]} without {option}", without(command, option), USAGE, [option, "required"])
    for command, option in [(TRAIN, "--metrics"), (TRAIN, "--steps"), (PLAN, "--hosts"), (SAMPLE, "--prompt"),
                            (["launch"], "-n"), (["bench", "step"], "--json")]:
        yield Row(f"{command[0]} {option} without a value", [*command, option], USAGE,
                  ["--ranks" if option == "-n" else option, "--help"])
    for option in some(["--model", "--strategy", "--data", "--metrics", "--trace", "--save-weights", "--out",
                        "--eval-data"], 3):
        yield Row(f"train {option} of nothing", [*TRAIN, option, ""], USAGE, [option, "must not be empty"])


NO_INTEGERS = ["-1", "1.5", "many", "", "99999999999999999999", "1e30", "nan", "0x10"]


def numbers():
    for option, least in [("--steps", 1), ("--batch", 1), ("--seq-len", 1), ("--seed", 0), ("--log-every", 1),
                          ("--eval-every", 0), ("--sample-tokens", 0), ("--top-k", 0)]:
        for value in some(NO_INTEGERS, 2) + (["0"] if least == 1 else []):
            yield Row(f"train {option} {value or 'of nothing'}", [*TRAIN, f"{option}={value}"] if value else
                      [*TRAIN, option, value], USAGE, [option, f"must be an integer from {least} to", value])
    for value in ["-1", "nan", "inf", "hot", ""]:
        yield Row(f"sample --temperature {value or 'of nothing'}", [*SAMPLE, "--temperature", value], USAGE,
                  ["--temperature", "must be a number from 0 to"])
    for value in some(["0", "-1", "nan", "inf"], 4):
        yield Row(f"train --peak-tflops {value}", [*TRAIN, f"--peak-tflops={value}"], USAGE, ["--peak-tflops", "must be a number from"])
    yield Row("train --batch beyond the data", [*TRAIN, "--batch", "100000"], CORRUPT, ["fewer than one step's", "hint:"])
    yield Row("train --seq-len beyond the model", [*TRAIN, "--seq-len", "17"], CONFIG, ["--seq-len 17", "hint:"])
    yield Row("train --seq-len beyond the data", [*TRAIN, "--model", "long.json"], CORRUPT, ["fewer than", "hint:"],
              files={"long.json": json.dumps(MODEL | {"seq_len": 1_000_000})})


def worlds():
    for value in some(["0", "-4", "two", "1.5", "99999999999999999999", "100000000", ""], 4):
        yield Row(f"plan --world-size {value or 'of nothing'}", [*PLAN, "--world-size", value], USAGE,
                  ["--world-size", "must be an integer from 1 to"])
    for value in some(["0", "-1", "x", "1e20"], 2):
        yield Row(f"plan --hosts {value}", [*PLAN, "--hosts", value], USAGE, ["--hosts", "must be an integer from 1 to"])
    yield Row("plan of hosts that do not divide", [*PLAN, "--world-size", "5", "--hosts", "2"], USAGE, ["5", "2"])
    yield Row("plan of more hosts than ranks", [*PLAN, "--hosts", "4"], USAGE, ["--hosts 4"])
    yield Row("plan over the limit", [*PLAN, "--strategy", "limit.json"], CONFIG, ["/memory/limit", "hint:"],
              files={"limit.json": json.dumps(STRATEGY | {"memory": {"limit": "1KiB"}})})


def launches():
    for value in some(["0", "-2", "two", "1025", "99999999999999999999", ""], 3):
        yield Row(f"launch -n {value or 'of nothing'}", ["launch", "-n", value, "--", "/bin/true"], USAGE,
                  ["--ranks", "must be an integer from 1 to 1024"])
    for value in some(["-1", "65536", "http", "99999999999"], 2):
        yield Row(f"launch --port {value}", [*LAUNCH, "--port", value, "--", "/bin/true"], USAGE,
                  ["--port", "must be an integer from 0 to 65535"])
    for value in some(["-1", "nan", "soon", "1e9"], 2):
        yield Row(f"launch --grace {value}", [*LAUNCH, "--grace", value, "--", "/bin/true"], USAGE,
                  ["--grace", "must be a number from 0"])
    yield Row("launch of 3 ranks on 2 hosts", ["launch", "-n", "3", "--pretend-hosts", "2", "--", "/bin/true"], USAGE,
              ["do not divide", "hint: give -n a multiple of --pretend-hosts"])
    yield Row("launch of 4 ranks on hosts of 2 and 3", ["launch", "-n", "4", "--pretend-hosts", "2,3", "--", "/bin/true"], USAGE,
              ["2 pretended hosts with 5 ranks", "hint: give -n the sum"])
    for value in some(["0", "-1", "2,", ",2", "2,x", "2,0", "two"], 3):
        yield Row(f"launch on {value!r} hosts", [*LAUNCH, f"--pretend-hosts={value}", "--", "/bin/true"], USAGE, ["--pretend-hosts", "hint:"])
    for words in (["--hosts", "2"], ["--hosts=2"]):
        yield Row(f"launch {words[0]} with a number", [*LAUNCH, *words, "--", "/bin/true"], USAGE,
                  ["--hosts takes no number", "hint: pretended hosts, for tests, are --pretend-hosts 2"])
    for value, wrong in some([("a:2,", "column 5"), ("", "column 1"), ("localhost,b:x", "column 13"), ("a;b", "column 2"), ("-oa", "column 1"),
                              ("a,a", "column 3")], 2):
        yield Row(f"launch --hosts {value!r}", ["launch", "--hosts", value, "--", "/bin/true"], USAGE, ["--hosts, " + wrong, "hint:"])
    for value in some(["0", "3:2", "1:", ":1", "1:2:3", "1:99999", "many"], 3):
        yield Row(f"launch --workers {value}", ["launch", f"--workers={value}", "--servers", "1", "--", "/bin/true"], USAGE,
                  ["--workers", "write --workers 1:8", "hint:"])
    yield Row("launch --workers and -n", [*LAUNCH, "--workers", "2", "--servers", "1", "--", "/bin/true"], USAGE, ["--ranks is for ranks of one job", "hint:"])
    yield Row("launch --workers without servers", ["launch", "--workers", "2", "--", "/bin/true"], USAGE, ["need servers", "hint:"])
    yield Row("launch --servers-state without servers", [*LAUNCH, "--servers-state", "state", "--", "/bin/true"], USAGE, ["no parameter servers", "hint:"])
    yield Row("launch --servers-lose without a folder", [*LAUNCH, "--servers", "1", "--servers-lose", "3", "--", "/bin/true"], USAGE, ["nowhere", "hint:"])
    yield Row("launch --join without workers", [*LAUNCH, "--join", "127.0.0.1:1", "--", "/bin/true"], USAGE, ["--workers 1:8", "hint:"])
    yield Row("launch --join of strangers", ["launch", "--workers", "1", "--join", "127.0.0.1:1", "--secret", "no-such-file", "--", "/bin/true"], MISSING,
              ["no-such-file", "hint:"])
    yield Row("launch --hosts of others", ["launch", "--hosts", "192.0.2.1:2,192.0.2.2:2", "--", "/bin/true"], USAGE,
              ["192.0.2.1, is not this machine", "hint:"])
    yield Row("launch --hosts and -n", [*LAUNCH, "--hosts", "localhost:2", "--", "/bin/true"], USAGE, ["-n and hosts", "hint:"])
    yield Row("launch --hosts that is never reached", ["launch", "--hosts", "localhost,b", "--address", "127.0.0.1", "--ssh", "no-such-ssh", "--",
                                                       "/bin/true"], MISSING, ['host b cannot be reached', '"no-such-ssh"', "hint:"])
    for number in ["1", "2"]:
        yield Row(f"launch --hosts and {number} pretended", ["launch", "--hosts", "localhost:2", "--pretend-hosts", number, "--", "/bin/true"], USAGE,
                  ["--pretend-hosts", "over ssh", "hint:"])
    yield Row("launch --hostfile of a text", ["launch", "--hostfile", "text", "--", "/bin/true"], CONFIG, ["text:1:", "hint:"])
    yield Row("launch --hostfile of nothing", ["launch", "--hostfile", "no-such-file", "--", "/bin/true"], MISSING, ["no-such-file", "hint:"])
    yield Row("launch --env here", [*LAUNCH, "--env", "A", "--", "/bin/true"], USAGE, ["--env is for ranks on several hosts", "hint:"])
    yield Row("launch of nothing", LAUNCH, USAGE, ["no program given", "hint:"])
    yield Row("launch -- of nothing", [*LAUNCH, "--"], USAGE, ["no program given", "hint:"])
    yield Row("launch of an empty name", [*LAUNCH, "--", ""], USAGE, ["no program given", "hint:"])
    yield Row("launch of two programs", [*LAUNCH, "/bin/echo", "--", "/bin/true"], USAGE, ["two programs", "hint:"])
    yield Row("launch of a missing program", [*LAUNCH, "--", "no-such-program"], MISSING, ["no-such-program", "hint:"])
    yield Row("launch of a missing path", [*LAUNCH, "--", "./no-such-program"], MISSING, ["no-such-program", "hint:"])
    yield Row("launch of a text", [*LAUNCH, "--", "./text"], DENIED, ["./text", "hint:"])
    yield Row("launch of a directory", [*LAUNCH, "--", "./"], DENIED, ["is a directory", "hint:"])
    yield Row("launch of a very long name", [*LAUNCH, "--", "x" * 100_000], RESOURCE, ["File name too long", "hint:"])
    yield Row("launch of a program that fails", [*LAUNCH, "--", "/bin/sh", "-c", "exit 9"], 9, ["first cause"], poor=True)
    yield Row("launch keeps the order of words", [*LAUNCH, "/bin/echo", "one", "--two", "-n", "3"], 0,
              ["one --two -n 3"])


# ------------------------------------------------------------------------------------------------------ input files

def no_permission(name):
    def prepare(folder):
        path = folder / name
        path.write_text("{}")
        path.chmod(0)
    return prepare


def hidden_folder(folder):
    (folder / "locked").mkdir()
    (folder / "locked" / "file").write_text("{}")
    (folder / "locked").chmod(0)


def fifo(name):
    return lambda folder: os.mkfifo(folder / name)


def link(name, target):
    return lambda folder: (folder / name).symlink_to(target)


def input_files():
    for option, command, count in [("--model", TRAIN, 20), ("--strategy", TRAIN, 8), ("--data", TRAIN, 20),
                                   ("--eval-data", TRAIN, 3), ("--weights", SAMPLE, 8), ("--model", PLAN, 2)]:
        yield from some(of_one_input(option, command), count)


def of_one_input(option, command):
    def row(kind, path, code, says, **more):
        return Row(f"{command[0]} {option}: {kind}", [*command, option, path], code, says, **more)
    text = option in ("--data", "--eval-data")
    yield row("missing", "missing.json", MISSING, ["missing.json", "No such file", "hint:"])
    yield row("in a missing folder", "no/such/file", MISSING, ["no/such/file", "hint:"])
    yield row("through a file", "text/file", MISSING, ["text/file", "Not a directory", "hint:"])
    yield row("a dangling link", "dangling", MISSING, ["dangling", "hint:"], prepare=link("dangling", "nowhere"))
    yield row("a link to itself", "circle", MISSING, ["circle", "hint:"], prepare=link("circle", "circle"))
    yield row("a name too long", "x" * 300, MISSING, ["File name too long", "hint:"])
    yield row("an endless device", "/dev/zero", CORRUPT, ["/dev/zero", "is a device", "hint:"])
    yield row("no device", "/dev/null", CORRUPT, ["/dev/null", "is a device", "hint:"])
    yield row("a pipe that nobody writes", "pipe", CORRUPT, ["is a pipe", "hint:"], prepare=fifo("pipe"))
    yield row("no permission", "secret", DENIED, ["secret", "Permission denied", "hint:"], as_nobody=True,
              prepare=no_permission("secret"))
    yield row("in a locked folder", "locked/file", DENIED, ["Permission denied", "hint:"], as_nobody=True,
              prepare=hidden_folder)
    empty = {"empty": ""}
    if text:
        yield row("empty", "empty", CORRUPT, ["holds no text"], files=empty)
        yield row("an empty folder", "hollow", CORRUPT, ["holds no text"], prepare=lambda f: (f / "hollow").mkdir())
    else:
        if option == "--strategy":
            yield row("a directory", ".", CORRUPT, ["is a directory", "hint:"])
        else:  # a folder may be a model of Hugging Face
            yield row("a directory", ".", MISSING, ["config.json" if option == "--model" else "model.safetensors", "hint:"])
        yield row("empty", "empty", CORRUPT if option == "--weights" else CONFIG, ["empty", "hint:"], files=empty)
        yield row("random bytes", "noise", CORRUPT if option == "--weights" else CONFIG, ["noise", "hint:"],
                  files={"noise": bytes(range(256)) * 8})
    if option in ("--model", "--strategy"):
        yield row("too large", "large", CONFIG, ["larger than 1.00 MiB", "hint:"], files={"large": " " * (1 << 20) + "{}"})


BROKEN_JSON = {"nothing but a brace": "{", "a list": "[]", "a word": "model", "a number": "3", "null": "null",
               "a comment": "{} // yes", "a trailing comma": '{"model": "gpt",}', "single quotes": "{'model': 'gpt'}",
               "twice the same key": '{"model": "gpt", "model": "gpt"}', "deep": "[" * 5000, "two values": "{}{}",
               "NaN": '{"a": NaN}', "a NUL": '{"a": "\0"}', "bad UTF-8": b'{"a": "\xff"}', "a huge number": '{"a": 1e999}'}


def model_contents():
    def row(name, model, says, code=CONFIG, command=PLAN):
        text = model if isinstance(model, (str, bytes)) else json.dumps(model)
        return Row(f"model: {name}", [*command, "--model", "odd.json"], code, ["odd.json", *says], files={"odd.json": text})
    for name, text in some(BROKEN_JSON.items(), 5):
        yield row(name, text, ["hint:"])
    for key in some(["vocab_size", "seq_len", "layers", "width", "heads"], 2):
        yield row(f"no {key}", {k: v for k, v in MODEL.items() if k != key}, [f"/{key}: is needed"])
    for key in ["vocab_size", "seq_len", "layers", "width", "heads"]:
        for value in some([0, -1, 1.5, "8", None, 10**9, 2**63, 10**30, [], True], 2):
            yield row(f"{key} {value!r}", MODEL | {key: value}, [f"/{key}: must be an integer from 1 to", "docs/models.md"])
    for key, value in [("dropout", 1), ("dropout", -0.1), ("dropout", "a lot"), ("bias", 1), ("tie_head", "yes"),
                       ("mlp_ratio", 0), ("mlp_ratio", 5000), ("recompute", None)]:
        yield row(f"{key} {value!r}", MODEL | {key: value}, [f"/{key}: must be", "docs/models.md"])
    yield row("layer for layers", MODEL | {"layer": 2}, ['did you mean "layers"?'])
    yield row("an unknown kind", MODEL | {"model": "bert"}, ["must be one of gpt, llama"])
    yield row("gtp", MODEL | {"model": "gtp"}, ['did you mean "gpt"?'])
    yield row("heads that do not divide", MODEL | {"heads": 3}, ["must be a multiple of heads"])
    yield row("each size allowed, not all together",
              MODEL | {"vocab_size": 2**27, "seq_len": 2**20, "layers": 10000, "width": 2**20, "mlp_ratio": 1024},
              ["parameters; want 1e+14 at most"])
    for key in ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]:
        yield row(f"llama {key} too large", LLAMA | {key: 10**10}, [f"/{key}: must be an integer from 1 to"])
    yield row("llama with odd heads", LLAMA | {"hidden_size": 6}, ["must be even"])
    yield row("llama with heads that do not share", LLAMA | {"num_attention_heads": 4, "num_key_value_heads": 3,
                                                            "hidden_size": 16}, ["does not divide"])
    yield row("llama rope_theta 0", LLAMA | {"rope_theta": 0}, ["/rope_theta: must be a number above 0"])
    yield row("keys of gpt in a llama", LLAMA | {"layers": 2}, ["/layers: unknown key"])
    yield Row("model: larger than this machine", [*TRAIN, "--model", "odd.json"], RESOURCE, ["parameters", "hint:"],
              files={"odd.json": json.dumps(MODEL | {"width": 65536, "layers": 1000})})


def strategy_contents():
    def row(name, strategy, says):
        text = strategy if isinstance(strategy, (str, bytes)) else json.dumps(strategy)
        return Row(f"strategy: {name}", [*PLAN, "--strategy", "odd.json"], CONFIG, says, files={"odd.json": text})
    for name, text in some(BROKEN_JSON.items(), 3):
        yield row(name, text, ["odd.json"])
    cases = [("strategy", "full_shard", "/strategy"), ("strategy", 3, "/strategy"), ("prefetch", -1, "/prefetch"),
             ("prefetch", 10**9, "/prefetch"), ("gradient_accumulation", 0, "/gradient_accumulation"),
             ("gradient_accumulation", 10**12, "/gradient_accumulation"), ("gradient_clipping", -1, "/gradient_clipping"),
             ("gradient_sync", "never", "/gradient_sync"), ("optimizer", [], "/optimizer"), ("optimizer", {"lr": -5}, "lr"),
             ("optimizer", {"lr": "fast"}, "lr"), ("optimizer", {"betas": [0.9]}, "betas"),
             ("optimizer", {"type": "lyon"}, "type"), ("optimizer", {"momentum": 0.9}, "momentum"),
             ("mesh", {"shard": -1}, "shard"), ("mesh", {"shard": 3}, "3"), ("mesh", {"replicate": 10**9}, "replicate"),
             ("units", {"classes": "Block"}, "classes"), ("units", {"classes": ["Block", "Block"]}, "classes"),
             ("memory", {"limit": "lots"}, "limit"), ("memory", {"limit": -1}, "limit"),
             ("comm", {"transport": "ucx"}, "transport"), ("comm", {"timeout_s": 0}, "timeout_s"),
             ("comm", {"timeout_s": 1e30}, "timeout_s"), ("mixed_precision", {"param": "int8"}, "param"),
             ("offload", {"gradients": {}}, "offload"), ("offload", {"moments": {"tier": "nvme"}}, "paths"),
             ("checkpoint", {"async": 1}, "/checkpoint/async"), ("gradient_cliping", 1, "gradient_clipping"),
             ("lr", 0.1, "optimizer.lr"), ("x" * 1000, 1, "unknown key")]
    for key, value, says in some(cases, 12):
        yield row(f"{key[:30]} {str(value)[:30]}", {key: value}, [says])


def data_contents():
    def row(name, file, content, says, code=CORRUPT, more=()):
        return Row(f"data: {name}", [*TRAIN, "--data", file, *more], code, says, files={file: content})
    yield row("a zip", "data.pt", b"PK\x03\x04" + bytes(100), ["zip archive", "hint:"])
    yield row("gzip", "data.gz", b"\x1f\x8b" + bytes(100), ["gzip", "hint:"])
    yield row("a pickle", "data.pkl", b"\x80\x04" + bytes(100), ["pickle", "hint:"])
    yield row("Parquet", "data.parquet", b"PAR1" + bytes(100), ["Parquet", "hint:"])
    yield row("NumPy", "data.npy", b"\x93NUMPY" + bytes(100), ["NumPy", "hint:"])
    yield row(".bin of nothing known", "data.bin", bytes(100), ["magic number", "hint:"])
    yield row("llm.c cut short", "data.bin", (20240520).to_bytes(4, "little") + bytes(100), ["header"], more=[])
    yield row("llm.c of text", "words", "hello " * 1000, ["magic number"], more=["--data-format", "llmc"])
    yield row("Megatron of text", "words", "hello " * 1000, ["words.idx", "hint:"], MISSING, ["--data-format", "megatron"])
    yield row("an index without its data", "lone.idx", b"MMIDIDX\0\0" + bytes(50), ["lone.bin", "hint:"], MISSING)
    yield row("a single byte", "one", "x", ["fewer than one step's", "hint:"])
    yield Row("data: extensions that nothing has", [*TRAIN, "--data", ".", "--extensions", ".none"], CORRUPT,
              ["holds no text", ".none"])
    yield Row("data: a token beyond the vocabulary", [*TRAIN, "--model", "small.json"], CORRUPT, ["text at byte", "hint:"],
              files={"small.json": json.dumps(MODEL | {"vocab_size": 40})})


# ---------------------------------------------------------------------------------------------------------- outputs

def device(folder):
    """Makes a character device like /dev/null, which a careless program would replace."""
    try:
        os.mknod(folder / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:  # without root's rights, a link to a device serves as well
        (folder / "device").symlink_to("/dev/null")


def read_only(folder):
    (folder / "readonly").mkdir()
    (folder / "readonly").chmod(0o555)


def outputs():
    yield from of_one_option("--metrics")
    yield from some(of_one_option("--trace"), 5)
    yield from some(of_one_option("--save-weights"), 6)
    yield Row("train --tensorboard: through a file", [*TRAIN, "--tensorboard", "text/board"], CREATE, ["--tensorboard", "Not a directory"])
    yield Row("train --tensorboard: the data's folder", [*TRAIN, "--data", "corpus", "--tensorboard", "corpus"], USAGE,
              ["--tensorboard", "among the input's files", "hint:"],
              prepare=lambda f: ((f / "corpus").mkdir(), (f / "corpus" / "a.txt").write_text("words " * 500)))
    yield Row("train --tensorboard: no permission", [*TRAIN, "--tensorboard", "readonly/board"], DENIED,
              ["--tensorboard", "Permission denied"], as_nobody=True, prepare=read_only)
    yield from of_several_options()


def of_one_option(option):
    def row(kind, path, code, says, **more):
        return Row(f"train {option}: {kind}", [*TRAIN, option, path], code, says, **more)
    yield row("a directory", ".", CREATE, [option, "is a directory", "hint:"])
    yield row("a name with a slash at its end", "folder/", CREATE, [option, "is a directory", "hint:"])
    yield row("a full disk", "/dev/full", CREATE, [option, "is a device", "hint:"])
    yield row("a device", "device", CREATE, [option, "hint:"], prepare=device)
    yield row("a pipe", "pipe", CREATE, [option, "is a device or a pipe", "hint:"], prepare=fifo("pipe"))
    yield row("a link", "link", CREATE, [option, "symbolic link", "hint:"], prepare=link("link", "text"))
    yield row("a dangling link", "link", CREATE, [option, "symbolic link", "hint:"], prepare=link("link", "nowhere"),
              absent=["nowhere"])
    yield row("through a file", "text/out", CREATE, [option, "Not a directory"])
    yield row("a name too long", "x" * 300, CREATE, [option, "too long"])
    yield row("exists", "old", CREATE, [option, "old exists already", "--overwrite"], files={"old": "results"},
              keeps=["old"])
    yield row("half written before", "old", CREATE, [option, "old.partial exists already", "--overwrite"],
              files={"old.partial": "results"}, keeps=["old.partial"])
    yield row("no permission", "readonly/out", DENIED, [option, "Permission denied", "hint:"], as_nobody=True,
              prepare=read_only)
    for name, given in [("--model", "model.json"), ("--strategy", "strategy.json"), ("--data", "text")]:
        yield row(f"the {name} itself", given, USAGE, [f"{option} {given} and {name} {given}", "hint:"])
        yield Row(f"train {option}: the {name} itself, to be overwritten", [*TRAIN, option, f"./{given}", "--overwrite"],
                  USAGE, [option, name, "same file", "hint:"])
    yield Row(f"train {option}: a hard link of the data", [*TRAIN, option, "hard", "--overwrite"], USAGE,
              ["same file", "hint:"], prepare=lambda folder: os.link(folder / "text", folder / "hard"), keeps=["hard"])
    yield Row(f"train {option}: among the data", [*TRAIN, "--data", "corpus", option, "corpus/out"], USAGE,
              ["among the input's files", "hint:"], absent=["corpus/out"],
              prepare=lambda f: ((f / "corpus").mkdir(), (f / "corpus" / "a.txt").write_text("words " * 500)))


def of_several_options():
    for one, other in [("--metrics", "--trace"), ("--metrics", "--save-weights"), ("--trace", "--save-weights")]:
        yield Row(f"{one} and {other} are one file", [*TRAIN, one, "out", other, "./out"], USAGE, ["are one file", "hint:"])
    yield Row("--metrics where the weights are made", [*TRAIN, "--metrics", "w.pt.partial", "--save-weights", "w.pt"], USAGE,
              ["are one file", "hint:"])
    yield Row("a good output beside a bad one", [*TRAIN, "--metrics", "good", "--save-weights", "/dev/full"], CREATE,
              ["--save-weights"], absent=["good"])
    for option in ["--json", "--csv"]:
        yield Row(f"bench {option} exists", ["bench", "buckets", "--quick", "-n", "1", option, "old"], USAGE, ["2 ranks"],
                  files={"old": "results"}, keeps=["old"])
    yield Row("bench --json is a device", ["bench", "optimizer", "--quick", "--json", "/dev/full"], CREATE, ["--json", "hint:"])
    yield Row("bench --json is kept", ["bench", "optimizer", "--quick", "--json", "old"], CREATE, ["--overwrite"],
              files={"old": "results"}, keeps=["old"])


def run_directories():
    yield Row("--out is a file", [*TRAIN, "--out", "text"], CREATE, ["--out", "Not a directory"])
    yield Row("--out is a device", [*TRAIN, "--out", "/dev/null"], CREATE, ["--out"])
    yield Row("--out holds results", [*TRAIN, "--out", "run"], CREATE, ["--out", "config.json exists already", "--overwrite"],
              prepare=lambda f: ((f / "run").mkdir(), (f / "run" / "config.json").write_text("{}")),
              keeps=["run/config.json"])
    yield Row("--out holds weights", [*TRAIN, "--out", "run"], CREATE, ["weights.pt exists already", "--overwrite"],
              prepare=lambda f: ((f / "run").mkdir(), (f / "run" / "weights.pt").write_text("old")),
              keeps=["run/weights.pt"], absent=["run/config.json", "run/metrics.jsonl"])
    yield Row("--out without permission", [*TRAIN, "--out", "readonly/run"], DENIED, ["--out", "Permission denied"],
              as_nobody=True, prepare=read_only)
    yield Row("--out among the data", [*TRAIN, "--data", ".", "--out", "run"], USAGE, ["among the input's files"])


def evaluations():
    yield Row("--eval-every without data", [*TRAIN, "--eval-every", "1"], USAGE, ["--eval-data"])
    yield Row("--eval-batches without data", [*TRAIN, "--eval-batches", "1"], USAGE, ["--eval-data"])
    yield Row("--eval-data too short", [*TRAIN, "--eval-data", "tiny"], CORRUPT, ["--eval-data tiny", "hint:"],
              files={"tiny": "x" * 5})
    yield Row("--metrics is the held-out data", [*TRAIN, "--eval-data", "held_out", "--metrics", "held_out", "--overwrite"],
              USAGE, ["--eval-data", "same file"])


def hugging_face():
    broken = {"t.json": "{}"}
    yield Row("train --init-from a pickle", [*TRAIN, "--init-from", "weights.pt"], CORRUPT, ["weights.pt", "scripts/to_safetensors.py"])
    yield Row("train --init-from nothing", [*TRAIN, "--init-from", "none"], MISSING, ["none", "No such file", "hint:"])
    yield Row("train --init-from a folder without weights", [*TRAIN, "--init-from", "."], MISSING, ["model.safetensors", "hint:"])
    yield Row("train --tokenizer that is none", [*TRAIN, "--tokenizer", "t.json"], CORRUPT, ["t.json", "/model"], files=broken)
    yield Row("train --tokenizer that is missing", [*TRAIN, "--tokenizer", "none.json"], MISSING, ["none.json", "hint:"])
    yield Row("train --export-hf of a model that is not there", [*TRAIN, "--model", "odd.json", "--export-hf", "out"], CONFIG, ["GPT-2", "bias"],
              files={"odd.json": json.dumps({**MODEL, "bias": False})}, absent=["out"])
    yield Row("train --export-hf over the text", [*TRAIN, "--export-hf", "text"], CREATE, ["--export-hf", "text"], keeps=["text"])
    yield Row("tokenize with what is no tokenizer", ["tokenize", "--tokenizer", "t.json", "--data", "text", "--out", "out"], CORRUPT,
              ["t.json", "/model"], files=broken, absent=["out.idx", "out.bin"])
    yield Row("checkpoint export of no checkpoint", ["checkpoint", "export", ".", "out"], MISSING, ["latest"], absent=["out"])


def samples():
    yield Row("weights of another model", [*SAMPLE, "--model", "other.json"], CORRUPT, ["do not fit the model"],
              files={"other.json": json.dumps(MODEL | {"width": 32})})
    yield Row("weights cut short", [*SAMPLE, "--weights", "short.pt"], CORRUPT, ["cut short"],
              prepare=lambda f: (f / "short.pt").write_bytes((f / "weights.pt").read_bytes()[:200]))
    yield Row("weights that are a text", [*SAMPLE, "--weights", "text"], CORRUPT, ["text is a text", "hint:"])
    yield Row("weights without their part", [*SAMPLE, "--weights-part", "ema"], CORRUPT, ["no set of weights \"ema\"", "--weights-part"])
    yield Row("--weights-part of safetensors", [*SAMPLE, "--weights", "w.safetensors", "--weights-part", "ema"], USAGE, ["--weights-part"])
    yield Row("train --weights-part of nothing", [*TRAIN, "--weights-part", "ema"], USAGE, ["--load-weights"])
    yield Row("train --load-weights nothing", [*TRAIN, "--load-weights", "none"], MISSING, ["none", "No such file", "hint:"])
    yield Row("train --load-weights and --init-from", [*TRAIN, "--load-weights", "weights.pt", "--init-from", "d"], USAGE,
              ["--init-from and --load-weights", "hint:"])
    yield Row("sample of no tokens", [*SAMPLE, "--tokens", "0"], USAGE, ["--tokens"])
    yield Row("sample of a model without bytes", [*SAMPLE, "--model", "few.json"], CONFIG, ["hint:"],
              files={"few.json": json.dumps(MODEL | {"vocab_size": 40})})
    yield Row("train and sample of a model without bytes", [*TRAIN, "--model", "few.json", "--sample-tokens", "3"], CONFIG,
              ["hint:"], files={"few.json": json.dumps(MODEL | {"vocab_size": 40})})


# -------------------------------------------------------------------------------------------------------- variables

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


def launcher_variables():
    def row(name, variables, says, code=CONFIG, more=()):
        return Row(f"variables: {name}", [*TRAIN, *more], code, says, environment=variables)
    whole = ["want a whole number", "launcher sets these variables"]
    for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]:
        yield row(f"{name} alone", {name: "1"}, ["only a part of torchrun's variables", "hint:"])
        for value in some(["-1", "two", "1.5", "99999999999999999999"], 1):
            yield row(f"{name}={value}", TORCHRUN | {name: value}, [f"{name}={value}", *whole])
    yield row("RANK of 100 kB", TORCHRUN | {"RANK": "1" * 100_000}, ["bytes more", "launcher sets"])
    yield row("RANK=5 of 2", TORCHRUN | {"RANK": "5", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
              ["RANK=5", "WORLD_SIZE=2", "launcher sets these variables"])
    yield row("a local rank beyond its host", TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, ["LOCAL_RANK=1", "hint:"])
    yield row("hosts that do not fill", TORCHRUN | {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "2"}, ["evenly", "hint:"])
    yield row("MASTER_PORT=http", TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT=http", *whole])
    yield row("MASTER_PORT=70000", TORCHRUN | {"MASTER_PORT": "70000"}, ["MASTER_PORT=70000", *whole])
    yield row("TESSERA_HOSTS=0", {"TESSERA_HOSTS": "0"}, ["TESSERA_HOSTS=0", "hint:"])
    yield row("TESSERA_HOSTS=3 for one rank", {"TESSERA_HOSTS": "3"}, ["TESSERA_HOSTS=3", "hint:"])
    yield row("TESSERA_HOSTS=2,3 for one rank", {"TESSERA_HOSTS": "2,3"}, ["TESSERA_HOSTS=2,3 says 5 ranks", "hint:"])
    yield row("TESSERA_HOSTS=2,x", {"TESSERA_HOSTS": "2,x"}, ["TESSERA_HOSTS=2,x", "hint:"])
    yield row("TESSERA_LAUNCHER=me", TORCHRUN | {"TESSERA_LAUNCHER": "me"}, ["TESSERA_LAUNCHER=me", "hint:"])
    yield row("TORCHELASTIC_RESTART_COUNT=x", TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "x"}, ["RESTART_COUNT=x", "hint:"])
    yield row("TORCHELASTIC_USE_AGENT_STORE=maybe", TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "maybe"}, ["maybe", "hint:"])
    yield row("a part of Slurm", {"SLURM_PROCID": "0"}, ["a part of Slurm's variables", "hint:"])
    yield row("a part of Open MPI", {"OMPI_COMM_WORLD_RANK": "0"}, ["a part of Open MPI's variables", "hint:"])
    yield row("two launchers", TORCHRUN | {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4",
                                          "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"},
              ["two launchers disagree", "hint:"])
    two = TORCHRUN | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    second = two | {"RANK": "1", "LOCAL_RANK": "1"}
    yield row("a host that nobody knows", second | {"MASTER_ADDR": "no-such-host.invalid"},
              ["no-such-host.invalid", "MASTER_ADDR", "hint:"], PEER)
    yield row("a port that nobody serves", second | {"MASTER_ADDR": "127.0.0.1"}, ["no store at 127.0.0.1:1", "2 s"], PEER)
    yield row("100000 ranks", second | {"WORLD_SIZE": "100000", "LOCAL_WORLD_SIZE": "100000", "RANK": "99999",
                                        "LOCAL_RANK": "99999"}, ["no store at", "hint:"], PEER)
    yield Row("variables: rank 0 of 100000 waits for the others", [*TRAIN], PEER,
              ["99999 of 100000 ranks are still missing", "rank 1-1023"],
              environment=TORCHRUN | {"WORLD_SIZE": "100000", "LOCAL_WORLD_SIZE": "100000", "MASTER_PORT": "PORT"})
    yield Row("variables: a level of the log that there is not", PLAN, 0, ["plan of FULL_SHARD"],
              environment={"TESSERA_LOG_LEVEL": "loud"})
    yield Row("variables: no threads", [*TRAIN], 0, ["final loss"], environment={"OMP_NUM_THREADS": "-3"})


# ------------------------------------------------------------------------------------------- odd, and meant that way

def accepted():
    yield Row("--steps 2e0", [*TRAIN, "--steps", "2e0"], 0, ["step 2/2"])
    yield Row("--steps 2.0", [*TRAIN, "--steps", "2.0"], 0, ["step 2/2"])
    yield Row("an option twice", [*TRAIN, "--steps", "1", "--steps", "3"], 0, ["step 3/3"])
    yield Row("a name with blanks and quotes", [*TRAIN, "--metrics", "a b'\"\n.jsonl"], 0, ["final loss"])
    yield Row("a missing folder of an output", [*TRAIN, "--metrics", "new/folder/m.jsonl"], 0, ["metrics are in"])
    yield Row("--overwrite of results", [*TRAIN, "--metrics", "old", "--overwrite"], 0, ["metrics are in old"],
              files={"old": "results"})
    yield Row("an output beside filtered data", [*TRAIN, "--data", ".", "--extensions", ".txt", "--out", "run"], 0,
              ["weights are in run/weights.pt"], files={"a.txt": "words " * 500})
    yield Row("a very long prompt", [*SAMPLE, "--prompt", "x" * 1000], 0, [])
    yield Row("a prompt that looks like an option", [*SAMPLE, "--prompt", "--tokens"], 0, ["--tokens"])
