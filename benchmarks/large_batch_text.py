"""Trains a small GPT on the demo's text, run by run, for large_batch.py. It uses the standard library only."""

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys

from launch import metrics, steps_of

RANKS, SEQ_LEN = 2, 64
MODEL = {"model": "gpt", "vocab_size": 256, "seq_len": SEQ_LEN, "layers": 3, "width": 128, "heads": 4}
EVAL_SEQUENCES = 1024
# This is the rate of the loopback in runs whose bytes are counted, for both directions together. A step with a small
# batch waits for this slow network.
WIRE_RATE = "200mbit"


IN_NAMESPACE = (f"ip link set lo up && tc qdisc replace dev lo root tbf rate {WIRE_RATE} burst 256kb latency 50ms && "
                '"$@" >/dev/null && grep lo: /proc/net/dev')


def run(words):
    threads = max(1, len(os.sched_getaffinity(0)) // RANKS)
    done = subprocess.run([str(word) for word in words], env=os.environ | {"OMP_NUM_THREADS": str(threads)}, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"large_batch.py: {' '.join(map(str, words[-12:]))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def command(binary, folder, data, job, more):
    model, strategy = folder / "model.json", folder / "strategy.json"
    model.write_text(json.dumps(MODEL))
    strategy.write_text(json.dumps(job["strategy"]))
    return [binary, "launch", "-n", RANKS, "--no-prefix", "--", binary, "train", "--model", model, "--strategy", strategy,
            "--data", data[0], "--extensions", ".h", "--seed", job["seed"], *more]


def trained(binary, folder, data, job):
    """Trains `job`: {"name", "strategy", "batch", "seed", "steps"}. Returns the losses, the gradient noise scale (None
    if it is not known), and the share of communication."""
    unfinished = folder / "unfinished.jsonl"
    words = command(binary, folder, data, job, [
        "--steps", job["steps"], "--batch", job["batch"] // RANKS, "--log-every", job["steps"], "--metrics", unfinished, "--overwrite",
        "--eval-data", data[1], "--eval-batches", max(1, EVAL_SEQUENCES // job["batch"])])
    if not job.get("counts_bytes"):
        run(words)
        return outcome(metrics(unfinished), steps_of(unfinished))
    sent = counted(words)
    result = outcome(metrics(unfinished), steps_of(unfinished))
    return result | {"bytes_a_step": None if sent is None else bytes_of_steps(sent, binary, folder, data, job)}


def outcome(lines, steps):
    """Returns the facts about the run from the lines of a metrics file."""
    last = steps[-max(1, len(steps) // 10):]
    second_half = steps[len(steps) // 2:]
    square, variance = (sum(step.get(field) or 0.0 for step in second_half) for field in ("noise_square", "noise_variance"))
    return {"loss": statistics.mean(number(step["loss"]) for step in last),
            "held_out_loss": number(next(line["eval_loss"] for line in reversed(lines) if "eval_loss" in line)),
            "noise_scale": variance / square if square > 0 else None,
            "s": sum(step["communication_seconds"] for step in steps) / sum(step["seconds"] for step in steps)}


def number(value):
    """Returns a number of the metrics. The metrics have null for numbers that are not finite."""
    return float("nan") if value is None else value


@functools.cache
def can_count():
    """Returns whether the user may make a network namespace. Its loopback counts bytes and has a limited rate."""
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return False
    return subprocess.run(["unshare", "-n", "sh", "-c", IN_NAMESPACE, "sh", "true"], capture_output=True).returncode == 0


def counted(words):
    """Runs the command in a new network namespace, and returns the number of bytes over its loopback. If no namespace
    can be made, runs the command without one, and returns None."""
    if not can_count():
        run(words)
        return None
    return int(run(["unshare", "-n", "sh", "-c", IN_NAMESPACE, "sh", *words]).split()[1])


def bytes_of_steps(sent, binary, folder, data, job):
    """Returns the bytes per step, without the bytes of the start and of the evaluation. A run of one step with a batch
    of 1 shows how many bytes the start and the evaluation need."""
    first = command(binary, folder, data, job, [
        "--steps", 1, "--batch", 1, "--log-every", 1, "--eval-data", data[1], "--eval-batches", max(1, EVAL_SEQUENCES // job["batch"])])
    return (sent - counted(first)) / (job["steps"] - 1)
