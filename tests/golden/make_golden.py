"""Writes the golden files of a version: the inputs below, the files that a `tessera` command of that version makes from
them, and the losses of the steps that follow.

golden_test.py reads them with later versions. A folder that is committed never changes. A version whose files have
another form gets its own folder, before its release.

Usage: make_golden.py TESSERA FOLDER
"""

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from patience import patient  # noqa: E402

MODEL = {"model": "gpt", "vocab_size": 256, "seq_len": 16, "layers": 2, "width": 6, "heads": 2, "mlp_ratio": 2,
         "tie_head": True}

# The first strategy trains in fp32 without any rounding, and the second stores everything in few bits. The third stores
# the residuals of compressed gradients, and the fourth continues from files in its own folder.
STRATEGIES = {
    "fp32": {
        "strategy": "FULL_SHARD",
        "units": {"classes": ["Block"]},
        "prefetch": 2,
        "host_sharing": False,
        "gradient_accumulation": 2,
        "gradient_sync": "last_microbatch",
        "gradient_clipping": 1.0,
        "optimizer": {"type": "adamw", "lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1,
                      "groups": [{"name": "vectors", "match": ["*"], "max_dim": 1, "lr_ratio": 2.0, "weight_decay": 0.0}]},
        "ema": {"decay": 0.9},
        "lr_schedule": {"type": "cosine", "warmup_steps": 2, "total_steps": 20, "min_ratio": 0.1},
        "on_spike": {"action": "skip", "factor": 3.0, "window": 3},
        "checkpoint": {"dir": "fp32", "every_steps": 100, "keep": 3, "failures": 1},
        "memory": {"limit": "1GiB", "tensor_heap": False},
        "comm": {"transport": "host", "timeout_s": 60, "init_timeout_s": 60}},
    "narrow": {
        "strategy": "SHARD_GRADIENTS",
        "units": {"modules": ["blocks.0", "blocks.1"]},
        "mixed_precision": {"param": "bf16", "reduce": "fp32", "master": "split", "keep_fp32": ["LayerNorm"]},
        "optimizer": {"type": "adamw", "lr": 0.01, "state_dtype": "8bit"},
        "lr_schedule": {"type": "wsd", "warmup_steps": 2, "total_steps": 20, "decay_steps": 5},
        "checkpoint": {"dir": "narrow", "async": True}},
    "compressed": {
        "strategy": "NO_SHARD",
        "units": {"bucket_cap_mb": 1},
        "optimizer": {"type": "muon", "lr": 0.01, "muon": {"momentum": 0.9, "ns_steps": 4}},
        "lr_schedule": {"type": "inverse_sqrt", "warmup_steps": 2},
        "compression": {"method": {"type": "top_k", "fraction": 0.25, "momentum": 0.5}, "start_step": 1},
        "checkpoint": {"dir": "compressed"},
        "check": {"replica_hash_every": 2},
        "comm": {"transport": "gloo"}},
    "durable": {
        "strategy": "SHARD_OPTIMIZER",
        "units": {"min_numel": 1000},
        "reductions_ahead": 1,
        "optimizer": {"type": "adam", "lr": 0.01, "state_dtype": "bf16"},
        "gradient_clip_value": 0.5,
        "durable": {"every": 2, "dir": "durable"}},
}
KEPT, NEXT = 4, 8  # numbers of steps
SUMS = "SHA256SUMS"


def some_text():
    """Returns words in an order that has no period."""
    words = ["gather", "wait", "release", "shard", "unit", "mesh", "rank", "plan", "\n", "step"]
    state, text = 1, ""
    for _ in range(500):
        state = (state * 1664525 + 1013904223) % 2 ** 32
        text += words[(state >> 24) % 10] + " "
    return text


def train_command(tessera, name, steps, *more):
    """Returns the command. It must be run in a folder of golden files, or in a copy of one."""
    return [tessera, "launch", "-n", "2", "--", tessera, "train", "--model", "model.json", "--strategy", f"{name}.json", "--data",
            "text.txt", "--steps", str(steps), "--batch", "2", "--seed", "7", "--log-every", "1", *more]


def sample_command(tessera):
    return [tessera, "sample", "--model", "model.json", "--weights", "weights.pt", "--prompt", "gather ", "--tokens", "8", "--temperature", "0"]


def outputs_of(name):
    """Returns the files that a run writes. The run of the first strategy also writes one file of each other kind."""
    if name != "fp32":
        return ["--metrics", f"{name}.jsonl"]
    return ["--metrics", "fp32.jsonl", "--trace", "trace.json", "--save-weights", "weights.pt"]


def run(command, folder):
    """Runs a command and returns its output. Raises an error with the output if the command fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TESSERA_")} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                           timeout=patient(100))
    output = ended.stdout.decode(errors="replace")
    if ended.returncode != 0:
        raise RuntimeError(f"ended with {ended.returncode}: {' '.join(map(str, command))}\n{output}")
    return output


def steps_of(metrics):
    """Returns {step: loss} of a file of metrics. If a step was made twice, its last loss counts."""
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def sums_of(folder):
    """Returns {name: SHA-256} of all files that a version wrote or read."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name not in (SUMS, "README.md"))
    return {file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main(tessera, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps(MODEL) + "\n")
    (folder / "text.txt").write_text(some_text())
    for name, strategy in STRATEGIES.items():
        (folder / f"{name}.json").write_text(json.dumps(strategy, indent=1) + "\n")
        run(train_command(tessera, name, KEPT, *outputs_of(name)), folder)
    for lock in [*folder.rglob("*lock")]:  # each lock names the process that held it
        lock.write_text("")
    expected = {"losses": {}}
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / "copy"
        shutil.copytree(folder, copy)
        for name in STRATEGIES:
            run(train_command(tessera, name, NEXT, "--metrics", f"{name}.jsonl"), copy)
            expected["losses"][name] = {step: loss for step, loss in steps_of(copy / f"{name}.jsonl").items() if step > KEPT}
        expected["sample"] = run(sample_command(tessera), copy)
    (folder / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in sums_of(folder).items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
