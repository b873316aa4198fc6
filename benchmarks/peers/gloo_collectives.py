#!/usr/bin/env python3
"""Times torch.distributed's collectives on Gloo, in fp32. Also times the limits that the memory alone sets.

A collective's `bytes` are the size of the *full* buffer (the output of an all-gather, the input of a
reduce-scatter). Ranks have private memory, so every implementation must move certain bytes. The limit of a collective
is the time in which a plain loop moves these bytes, in all ranks at once. The loop does not wait for other ranks:

    reduce_scatter    each rank reads its slice of all inputs, and writes it once    torch.add
    all_gather        each rank reads the slices of other ranks, and writes them     copy_
    all_reduce        first reduce_scatter, then all_gather

Every result is checked before anything is timed. The program prints one JSON line for each rank:

    {"peer": "gloo", "rank", "ranks", "threads",
     "cases": [{"contender": "gloo" | "limit", "collective", "bytes", "samples_s"}]}
"""

import argparse
import time

import torch
import torch.distributed as dist
from common import Ranks, standard_output

BATCH = 10  # calls between two looks at the clock, which decides whether there is time for more


class Collectives:
    """Buffers of the largest size. A call uses a part of them that has the wanted size. Each method returns the call to
    time."""

    def __init__(self, ranks, most_bytes):
        numel = max(most_bytes // 4, ranks.count)
        self.ranks = ranks
        self.full = torch.ones(numel)
        self.slice = torch.ones(-(-numel // ranks.count))
        self.scratch = torch.ones(numel)

    def barrier(self, _):
        return dist.barrier

    def all_reduce(self, numel):
        values = self.full[:numel]
        values.fill_(1.0)
        dist.all_reduce(values)
        self.check(values, self.ranks.count)
        # Later calls would add to the sums of earlier calls and overflow, so all values are 0 from here on.
        values.zero_()
        return lambda: dist.all_reduce(values)

    def reduce_scatter(self, numel):
        values, output = self.full[:numel], self.slice[:numel // self.ranks.count]
        values.fill_(1.0)
        dist.reduce_scatter_tensor(output, values)
        self.check(output, self.ranks.count)
        return lambda: dist.reduce_scatter_tensor(output, values)

    def all_gather(self, numel):
        values, part = self.full[:numel], self.slice[:numel // self.ranks.count]
        part.fill_(self.ranks.rank + 1.0)
        dist.all_gather_into_tensor(values, part)
        for rank, gathered in enumerate(values.chunk(self.ranks.count)):
            self.check(gathered, rank + 1.0)
        return lambda: dist.all_gather_into_tensor(values, part)

    def check(self, values, wanted):
        if not bool((values == wanted).all()):
            raise RuntimeError(f"rank {self.ranks.rank}: a collective of {values.numel()} values did not give {wanted} "
                               "everywhere")


class Limits:
    """Moves the same bytes as the collectives do, without waiting. Slice r belongs to this rank; local memory stands
    for the inputs of other ranks."""

    def __init__(self, collectives):
        self.buffers = collectives
        self.count = collectives.ranks.count

    def reduce_scatter(self, numel):
        part = numel // self.count
        sources = [self.buffers.scratch[i * part:(i + 1) * part] for i in range(self.count)]
        output = self.buffers.slice[:part]

        def call():
            torch.add(sources[0], sources[1], out=output)
            for source in sources[2:]:
                output.add_(source)

        return call

    def all_gather(self, numel):
        others = numel - numel // self.count
        return lambda: self.buffers.full[:others].copy_(self.buffers.scratch[:others])

    def all_reduce(self, numel):
        first, second = self.reduce_scatter(numel), self.all_gather(numel)

        def call():
            first()
            second()

        return call


def measure(call, seconds, least):
    """Times `call` until rank 0 has spent `seconds`, and at least `least` times. All ranks call it equally often."""
    for _ in range(3):
        call()
    samples = []
    go_on = torch.ones(1)
    begin = time.perf_counter()
    while go_on:
        for _ in range(BATCH if len(samples) >= least else least):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        go_on.fill_(time.perf_counter() - begin < seconds)
        dist.broadcast(go_on, src=0)
    return samples


def sizes(most_bytes):
    """Returns 4 B, 64 B, 1 KiB, ..., and the largest size. The factor between sizes is 16 for small sizes, and 4 from
    64 KiB on."""
    size = 4
    while size < most_bytes:
        yield size
        size *= 16 if size < 65536 else 4
    yield most_bytes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most-bytes", type=int, required=True, help="largest full buffer")
    parser.add_argument("--seconds", type=float, required=True, help="for each case")
    parser.add_argument("--least", type=int, default=5, help="samples of each case, even if it takes longer")
    options = parser.parse_args()
    ranks = Ranks()
    if ranks.count < 2:
        parser.error("needs two ranks or more")
    torch.set_num_threads(1)
    with standard_output() as emit:
        ranks.join()
        collectives = Collectives(ranks, options.most_bytes)
        limits = Limits(collectives)
        cases = []

        def add(contender, collective, size, call):
            samples = measure(call, options.seconds, options.least)
            cases.append({"contender": contender, "collective": collective, "bytes": size, "samples_s": samples})

        add("gloo", "barrier", 0, collectives.barrier(0))
        add("gloo", "all_reduce", 4, collectives.all_reduce(1))
        for size in sizes(options.most_bytes):
            numel = size // 4 // ranks.count * ranks.count
            if numel == 0:
                continue
            for collective in ("all_reduce", "reduce_scatter", "all_gather"):
                add("gloo", collective, numel * 4, getattr(collectives, collective)(numel))
                add("limit", collective, numel * 4, getattr(limits, collective)(numel))
        emit({"peer": "gloo", "rank": ranks.rank, "ranks": ranks.count, "threads": 1, "cases": cases})
        ranks.leave()


if __name__ == "__main__":
    main()
