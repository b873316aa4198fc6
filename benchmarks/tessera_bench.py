"""Runs `tessera bench SECTION --json FILE [--quick]` if the command has it, and checks the form of the file.

    collectives  {"cases": [{"operation", "memory": "private" | "group" | "common", "dtype", "bytes",
                             "samples_ns": [...], "limit_s": seconds or null}]}
                 bytes: the full buffer, as in peers/gloo_collectives.py; 0 for the barrier. limit_s: the same reads and
                 writes by all ranks at once, without waiting. dtype: of sums; an integer type where bytes are only
                 moved. The fields "operation" and "samples_ns" are handed on as "collective" and "samples_s".
    optimizer    {"cases": [{"name", "numel", "bytes", "samples_s": [...], "limit_s": seconds or null}]}, one thread (on
                 the GPU with --gpu). Names that have a peer: "fp32", "mixed" (bf16 parameters, fp32 masters),
                 "mixed_bf16_moments", on the GPU "mixed_8bit_moments". bytes: read and written.
    codecs       the same for the codecs of the wire: "int8_encode", "int8_encode_feedback", "int8_decode", those of int4,
                 "votes_encode", "signs_encode_feedback"
    buckets      {"transport", "ranks",
                  "models": [{"model", "data", "parameters", "gradient_bytes", "steps_a_round",
                              "first_loss", "last_loss",
                              "per_tensor_collectives", "per_tensor_samples_s": [...],
                              "per_tensor_communication_s": [...],
                              "sweep": [{"bucket_bytes", "collectives", "samples_s": [...], "communication_s": [...]}],
                              "reductions": [{"bytes", "samples_s": [...]}],
                              "inference": {"loss", "accuracy", "samples_s": [...]}}]}
                 steps_a_round: buckets are measured in turn, with this many samples of each bucket in a round.
                 samples_s of the sweep: the seconds of steps with that bucket on the slowest rank. communication_s: the
                 part of each step that was spent in reductions, on the rank that waited least for others. reductions:
                 single collectives, for the alpha-beta fit; inference: forwards of the trained model over held-out
                 batches.
    offload      {"disks": [{"bytes", "engine", "write", "read", "mixed"}], "steps": [{"name", "numel", "bytes_moved",
                 "step_s": [...], "in_memory_s": [...], "transfer_s": [...]}]}, one thread; needs --dir
                 disks: by io_uring, then by threads; each pass {"samples_s": [...], "cpu_s": [...]}, bytes: one way.
                 Names of steps are those of the optimizer. in_memory_s: the update alone; transfer_s: the records
                 alone.
    step, memory, overhead, launches
                 {"columns": [name, ...], "rows": [[text or number, ...], ...]}, shown as they are.

It uses the standard library only.
"""

import json
import pathlib
import re
import subprocess
import tempfile

SECTIONS = ("collectives", "optimizer", "step", "memory", "overhead", "buckets")
TIMEOUT_S = 600


def _form(names, **inner):
    return dict.fromkeys(names.split()) | inner


_PASS, _TABLE = _form("samples_s cpu_s"), _form("columns rows")
# This is the form of an object of each section: the names of its fields, and the forms of fields that are objects or
# lists of objects.
_FORMS = {
    "collectives": _form("", cases=_form("operation memory dtype bytes samples_ns limit_s")),
    "optimizer": _form("", cases=_form("name numel bytes samples_s limit_s")),
    "codecs": _form("", cases=_form("name numel bytes samples_s limit_s")),
    "offload": _form("", disks=_form("bytes engine", write=_PASS, read=_PASS, mixed=_PASS),
                     steps=_form("name numel bytes_moved memory_bytes step_s in_memory_s transfer_s")),
    "buckets": _form("", models=_form("model data gradient_bytes steps_a_round per_tensor_collectives per_tensor_samples_s "
                                      "per_tensor_communication_s", reductions=_form("bytes samples_s"),
                                      sweep=_form("bucket_bytes collectives samples_s communication_s"),
                                      inference=_form("loss accuracy samples_s"))),
}


class BenchFailed(Exception):
    pass


def _help(binary, *arguments):
    return subprocess.run([binary, *arguments, "--help"], capture_output=True, text=True, timeout=60).stdout


def offered_sections(binary):
    """Returns the sections that this binary has. If the command has no `bench`, `tessera bench --help` would print the
    general help. This function therefore looks for `bench` in the general help first."""
    if not re.search(r"^\s+bench\b", _help(binary), re.MULTILINE):
        return []
    text = _help(binary, "bench")
    return [section for section in SECTIONS if re.search(rf"^\s+{section}\b", text, re.MULTILINE)]


def run_section(binary, section, quick, more=(), timeout_s=TIMEOUT_S):
    """Runs a section and returns its result. Raises BenchFailed if the section ends with an error or writes something
    else."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        command = [binary, "bench", section, "--json", str(file), *more] + (["--quick"] if quick else [])
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise BenchFailed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return checked(section, json.loads(file.read_text()))


def run_buckets(binary, quick):
    """Runs "buckets" over shared memory, where starting a reduction costs almost nothing, and over Gloo."""
    written, over_gloo = (run_section(binary, "buckets", quick, more) for more in ((), ("--transport", "gloo")))
    written["models"] += [model | {"model": model["model"] + " over Gloo"} for model in over_gloo["models"]]
    return written


def checked(section, data):
    """Returns `data` in the peers' names and units, if its form is that of _FORMS."""
    _check(section, data, _FORMS.get(section, _TABLE))
    if section == "collectives":
        return {"cases": [_in_peers_terms(case) for case in data["cases"]]}
    if section not in _FORMS and any(len(row) != len(data["columns"]) for row in data["rows"]):
        raise BenchFailed(f"tessera bench {section}: a row has not {len(data['columns'])} columns")
    return data


def _check(section, value, form):
    for each in value if isinstance(value, list) else [value]:
        for name, inner in form.items():
            if name not in each:
                raise BenchFailed(f'tessera bench {section}: no "{name}" in {json.dumps(each)[:200]}')
            if inner:
                _check(section, each[name], inner)


def _in_peers_terms(case):
    terms = {"collective": case["operation"], "samples_s": [nanoseconds * 1e-9 for nanoseconds in case["samples_ns"]]}
    return terms | {name: case[name] for name in ("memory", "dtype", "bytes", "limit_s")}
