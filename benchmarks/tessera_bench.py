"""Runs `tessera bench SECTION --json FILE [--quick]` where the command has it, and checks the form of what it writes.

    collectives  {"cases": [{"operation", "memory": "private" | "group" | "common", "dtype", "bytes",
                             "samples_ns": [...], "limit_s": seconds or null}]}
                 bytes: the full buffer, as in peers/gloo_collectives.py; 0 for the barrier. limit_s: the same reads and
                 writes by all ranks at once, without waiting. dtype: of sums; something else where bytes are moved.
                 Handed on with "collective" and "samples_s" in the places of operation and samples_ns.
    optimizer    {"cases": [{"name", "numel", "bytes", "samples_s": [...], "limit_s": seconds or null}]}, one thread (on
                 the GPU with --gpu). Names that have a peer: "fp32", "mixed" (bf16 parameters, fp32 masters),
                 "mixed_bf16_moments", on the GPU "mixed_8bit_moments". bytes: read and written.
    buckets      {"transport", "ranks",
                  "models": [{"model", "data", "parameters", "gradient_bytes", "steps_a_round",
                              "first_loss", "last_loss",
                              "per_tensor_collectives", "per_tensor_samples_s": [...],
                              "per_tensor_communication_s": [...],
                              "sweep": [{"bucket_bytes", "collectives", "samples_s": [...], "communication_s": [...]}],
                              "reductions": [{"bytes", "samples_s": [...]}],
                              "inference": {"loss", "accuracy", "samples_s": [...]}}]}
                 steps_a_round: buckets are measured by turns, so many samples of each a round, in order. samples_s of
                 the sweep: steps with that bucket, of the slowest rank; communication_s: what of each was
                 spent in reductions, of the rank that waited least for others; reductions: single collectives, for the
                 alpha-beta fit; inference: forwards of the trained model over held-out batches.
    offload      {"disks": [{"bytes", "engine", "write", "read", "mixed"}], "steps": [{"name", "numel", "bytes_moved",
                 "step_s": [...], "in_memory_s": [...], "transfer_s": [...]}]}, one thread; needs --dir
                 disks: by io_uring, then by threads; each pass {"samples_s": [...], "cpu_s": [...]}, bytes: one way.
                 Names of steps are the optimizer's. in_memory_s: the update alone; transfer_s: the records alone.
    step, memory, overhead, launches
                 {"columns": [name, ...], "rows": [[text or number, ...], ...]}, shown as they are.

Standard library only.
"""

import json
import pathlib
import re
import subprocess
import tempfile

SECTIONS = ("collectives", "optimizer", "step", "memory", "overhead", "buckets")
_CASE_FIELDS = {"collectives": ("operation", "memory", "dtype", "bytes", "samples_ns", "limit_s"),
                "optimizer": ("name", "numel", "bytes", "samples_s", "limit_s")}
_PASS_FIELDS = ("bytes", "engine", "write", "read", "mixed")
_DISK_STEP_FIELDS = ("name", "numel", "bytes_moved", "step_s", "in_memory_s", "transfer_s")
_MODEL_FIELDS = ("model", "data", "gradient_bytes", "steps_a_round", "per_tensor_collectives",
                 "per_tensor_samples_s", "per_tensor_communication_s", "sweep", "reductions", "inference")
TIMEOUT_S = 600


class BenchFailed(Exception):
    pass


def _help(binary, *arguments):
    return subprocess.run([binary, *arguments, "--help"], capture_output=True, text=True, timeout=60).stdout


def offered_sections(binary):
    """The sections this binary has. A command without `bench` prints its general help for it: that is asked first."""
    if not re.search(r"^\s+bench\b", _help(binary), re.MULTILINE):
        return []
    text = _help(binary, "bench")
    return [section for section in SECTIONS if re.search(rf"^\s+{section}\b", text, re.MULTILINE)]


def run_buckets(binary, quick):
    """The buckets section over shared memory, where starting a reduction costs next to nothing, and over Gloo."""
    written = run_section(binary, "buckets", quick)
    over_gloo = run_section(binary, "buckets", quick, ["--transport", "gloo"])
    written["models"] += [model | {"model": model["model"] + " over Gloo"} for model in over_gloo["models"]]
    return written


def run_section(binary, section, quick, more=(), timeout_s=TIMEOUT_S):
    """What the section wrote. BenchFailed if it ends with an error or writes something else."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "bench.json"
        command = [binary, "bench", section, "--json", str(file), *more] + (["--quick"] if quick else [])
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
        if done.returncode != 0:
            raise BenchFailed(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        return checked(section, json.loads(file.read_text()))


def checked(section, data):
    """`data` if it has the form above, in the peers' names and units."""
    if section in _CASE_FIELDS:
        for case in _field(section, data, "cases"):
            for name in _CASE_FIELDS[section]:
                _field(section, case, name)
        if section == "collectives":
            data = {"cases": [_in_peers_terms(case) for case in data["cases"]]}
    elif section == "offload":
        for disk in _field(section, data, "disks"):
            for name in _PASS_FIELDS:
                _field(section, disk, name)
            for kind in ("write", "read", "mixed"):
                for name in ("samples_s", "cpu_s"):
                    _field(section, disk[kind], name)
        for step in _field(section, data, "steps"):
            for name in _DISK_STEP_FIELDS:
                _field(section, step, name)
    elif section == "buckets":
        for model in _field(section, data, "models"):
            for name in _MODEL_FIELDS:
                _field(section, model, name)
            for entry in model["sweep"]:
                for name in ("bucket_bytes", "collectives", "samples_s", "communication_s"):
                    _field(section, entry, name)
            for name in ("loss", "accuracy", "samples_s"):
                _field(section, model["inference"], name)
    else:
        columns = _field(section, data, "columns")
        if any(len(row) != len(columns) for row in _field(section, data, "rows")):
            raise BenchFailed(f"tessera bench {section}: a row has not {len(columns)} columns")
    return data


def _in_peers_terms(case):
    terms = {"collective": case["operation"], "samples_s": [nanoseconds * 1e-9 for nanoseconds in case["samples_ns"]]}
    return terms | {name: case[name] for name in ("memory", "dtype", "bytes", "limit_s")}


def _field(section, entry, name):
    if name not in entry:
        raise BenchFailed(f'tessera bench {section}: no "{name}" in {json.dumps(entry)[:200]}')
    return entry[name]
