"""Code that the programs of the compared frameworks (the peers) share. It covers how they find their rank, the model,
its samples, and the JSON line that most of them print.

A peer is started once for each rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in the environment, by
benchmarks/run or by `torchrun --nproc-per-node 2`.
"""

import contextlib
import json
import os
import pathlib
import sys

import numpy
import torch
import torch.distributed as dist

_REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_REPOSITORY / "tests" / "oracle"), str(_REPOSITORY / "benchmarks")]
from models import make_model  # noqa: E402

LLMC_HEADER_BYTES = 1024
ADAMW = dict(lr=3e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)


class Ranks:
    """This rank's number and the number of ranks, from the environment. If the environment has no such numbers, there
    is one rank."""

    def __init__(self):
        self.rank = int(os.environ.get("RANK", "0"))
        self.count = int(os.environ.get("WORLD_SIZE", "1"))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    def join(self, backend="gloo"):
        dist.init_process_group(backend, rank=self.rank, world_size=self.count)

    def leave(self):
        # Gloo's worker threads need the interpreter to free tensors, so they end before the interpreter ends.
        dist.barrier()
        dist.destroy_process_group()


@contextlib.contextmanager
def standard_output():
    """Yields a function that prints one JSON line. All other output goes to standard error meanwhile."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    yield lambda line: print(json.dumps(line), file=results, flush=True)


def new_model(config):
    """Makes a model that has the same weights on every rank and in every peer."""
    torch.manual_seed(1)
    return make_model(config)


class Batches:
    """Batches of a token file. Batch n of a rank has the samples from number (n * ranks + rank) * batch on: (tokens,
    targets), each [batch, T] int64."""

    def __init__(self, path, config, ranks, batch=1):
        self._tokens = numpy.fromfile(path, dtype="<u2", offset=LLMC_HEADER_BYTES)
        self._length = config["seq_len"]
        self._ranks = ranks
        self._batch = batch

    def of_step(self, step):
        first = (step * self._ranks.count + self._ranks.rank) * self._batch
        windows = torch.stack([self._window(first + place) for place in range(self._batch)])
        return windows[:, :-1], windows[:, 1:]

    def _window(self, sample):
        samples = (len(self._tokens) - 1) // self._length
        start = sample % samples * self._length
        return torch.from_numpy(self._tokens[start:start + self._length + 1].astype(numpy.int64))
