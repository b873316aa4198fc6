"""What the peers share: the work, the ranks, and the one JSON line each rank prints.

A peer is started once a rank with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, by benchmarks/run
or by `torchrun --nproc-per-node 2`. Standard output is the result alone; what libraries say goes to standard error.

A step of training is one line:

    {"peer", "rank", "ranks", "threads", "samples_s": [...], "loss": [...], "peak_bytes"}

samples_s: seconds from the end of one step to the end of the next, of the timed steps. loss: this rank's, of every step
from the first. peak_bytes: benchmarks/memory.py, over the steps that are else timed; only with --memory, and then
samples_s is empty.
"""

import argparse
import contextlib
import json
import os
import pathlib
import sys
import time

import numpy
import torch
import torch.distributed as dist

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_REPOSITORY / "tests" / "oracle"), str(_REPOSITORY / "benchmarks")]
from memory import PeakSampler  # noqa: E402
from models import make_model  # noqa: E402

LLMC_HEADER_BYTES = 1024
ADAMW = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class Ranks:
    """This rank's place, from the environment; one rank if that says nothing."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def join(self):
        dist.init_process_group("gloo", rank=self.rank, world_size=self.count)

    def leave(self):
        # Gloo's worker threads need the interpreter to free tensors: they are ended before it is.
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def standard_output():
    """Yields a function that prints one JSON line; whatever else is printed meanwhile goes to standard error."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    yield lambda line: print(json.dumps(line), file=results, flush=True)


def training_options(description, contenders):
    """Command line of a peer that trains."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=contenders, required=True)
    parser.add_argument("--model", required=True, help="model file (JSON)")
    parser.add_argument("--tokens", required=True, help="token file of llm.c, 16 bits a token")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones")
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--cool-down", type=int, default=0, help="steps after the timed ones")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    return parser.parse_args()


def read_model_config(path):
    return json.loads(pathlib.Path(path).read_text())


def new_model(config):
    """The same weights on every rank and in every peer."""
    torch.manual_seed(1)
    return make_model(config)


class Batches:
    """Sample `step * ranks + rank` of a token file: (tokens, targets), each [1, T] int64."""

    def __init__(self, path, config, ranks):
        self._tokens = numpy.fromfile(path, dtype="<u2", offset=LLMC_HEADER_BYTES)
        self._length = config["seq_len"]
        self._ranks = ranks

    def of_step(self, step):
        samples = (len(self._tokens) - 1) // self._length
        start = (step * self._ranks.count + self._ranks.rank) % samples * self._length
        window = torch.from_numpy(self._tokens[start:start + self._length + 1].astype(numpy.int64))
        return window[None, :-1], window[None, 1:]


def run_steps(step, options, ranks, meet=dist.barrier):
    """Runs `step(number) -> loss` as options say; returns the line to print.

    The ranks `meet` once before the timed steps, so that also those that train alone do it at the same time.
    """
    losses = [step(number) for number in range(options.warm_up)]
    meet()
    samples = []
    sampler = PeakSampler() if options.memory else contextlib.nullcontext()
    with sampler:
        end = time.perf_counter()
        for number in range(options.warm_up, options.warm_up + options.steps):
            losses.append(step(number))
            start, end = end, time.perf_counter()
            samples.append(end - start)
    for number in range(options.cool_down):
        losses.append(step(options.warm_up + options.steps + number))
    line = {"peer": options.contender, "rank": ranks.rank, "ranks": ranks.count, "threads": torch.get_num_threads(),
            "samples_s": [] if options.memory else samples, "loss": losses}
    if options.memory:
        line["peak_bytes"] = sampler.peak
    return line

