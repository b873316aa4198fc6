#!/usr/bin/env python3
"""Measures how the peers move records between memory and a disk: whole passes over one file, past the page cache.

    fio                 io_uring or libaio, the best of a sweep over engines, sizes and depths
    deepspeed_aio       DeepSpeed's aio handle with the defaults of its "aio" section: 1 MiB, 8 deep, one thread
    deepspeed_aio_best  the best of a sweep over sizes, depths and threads
    deepspeed_swapper   steps of DeepSpeedCPUAdam whose fp32 state the pipelined optimizer swapper keeps on the disk:
                        Reads of the next part and writes of the previous part run at the same time as the update of
                        this part

Prints one JSON line. For passes it is {"peer", "bytes", "settings", "write", "read", "mixed"}. `bytes` is the number of
bytes that a pass moves in one direction. The pass "mixed" reads as many as it writes. Each of "write", "read" and
"mixed" is {"samples_s": [...], "cpu_s": [...]}, with the CPU time of all threads. The file is written once before the
first pass. For steps the line is {"peer", "numel", "bytes", "samples_s": [...]}, and `bytes` is the number of bytes
that a step reads and writes.
"""

import argparse
import itertools
import json
import os
import pathlib
import resource
import shutil
import subprocess
import time
import types

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from common import ADAMW, standard_output  # noqa: E402

MIB = 1 << 20
SWEEP_BYTES = 1 << 30
DEFAULTS = {"block": MIB, "depth": 8, "threads": 1}  # defaults of DeepSpeed's "aio" section
PASSES = ("write", "read", "mixed")


def measured(work):
    """Returns how many seconds `work` takes, and the CPU seconds that it and its ended child processes use."""
    def cpu():
        uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(use.ru_utime + use.ru_stime for use in uses)
    before, start = cpu(), time.perf_counter()
    seconds = work()
    return seconds or time.perf_counter() - start, cpu() - before


class Fio:
    """Runs one process for each pass. The time is measured by fio's own clock, without fio's start."""

    SETTINGS = [{"engine": engine, "block": block, "depth": depth} for engine, block, depth in
                itertools.product(("io_uring", "libaio"), (MIB, 4 * MIB), (8, 32))]

    def __init__(self, file, size, settings):
        self._command = ["fio", "--name=pass", f"--filename={file}", f"--size={size}", "--direct=1", "--thread",
                         "--output-format=json", f"--ioengine={settings['engine']}", f"--bs={settings['block']}",
                         f"--iodepth={settings['depth']}"]
        self._size = size

    def run(self, kind):
        ways = {"write": ["--rw=write"], "read": ["--rw=read"], "mixed": ["--rw=rw", f"--io_size={2 * self._size}"]}
        done = subprocess.run(self._command + ways[kind], capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{"):])["jobs"][0]
        if job["error"]:
            raise RuntimeError(f"fio: error {job['error']}")
        return max(job["read"]["runtime"], job["write"]["runtime"]) / 1000


class DeepSpeedAio:
    """Makes passes over one file in pieces, with two handles of DeepSpeed, as DeepSpeed's swapper does."""

    SETTINGS = [{"block": block, "depth": depth, "threads": threads} for block, depth, threads in
                itertools.product((MIB, 8 * MIB), (8, 32), (1, 2))]
    PIECE = 64 * MIB  # bytes that one call moves: a parameter of 16 million fp32 values

    def __init__(self, file, size, settings):
        from deepspeed.ops.op_builder import AsyncIOBuilder
        import torch
        make = AsyncIOBuilder().load().aio_handle
        arguments = dict(block_size=settings["block"], queue_depth=settings["depth"], single_submit=False,
                         overlap_events=True, intra_op_parallelism=settings["threads"])
        self._reader, self._writer = make(**arguments), make(**arguments)
        self._file = str(file)
        self._offsets = range(0, size, self.PIECE)
        empty = torch.empty(0, dtype=torch.uint8)
        self._pieces = [self._reader.new_cpu_locked_tensor(self.PIECE, empty) for _ in range(3)]
        for piece in self._pieces:
            piece.fill_(1)

    def run(self, kind):
        pieces = itertools.cycle(self._pieces)
        if kind == "mixed":
            return self._mixed(pieces)
        handle = self._writer if kind == "write" else self._reader
        call = handle.sync_pwrite if kind == "write" else handle.sync_pread
        for offset in self._offsets:
            call(next(pieces), self._file, offset)
        return None

    def _mixed(self, pieces):
        """Reads the next part while the present part is written back."""
        held, offsets = next(pieces), list(self._offsets)
        self._reader.sync_pread(held, self._file, offsets[0])
        for offset, following in itertools.zip_longest(offsets, offsets[1:]):
            self._writer.async_pwrite(held, self._file, offset)
            if following is not None:
                held = next(pieces)
                self._reader.async_pread(held, self._file, following)
                self._reader.wait()
            self._writer.wait()


def passes(contender, settings, file, size, rounds):
    mover = contender(file, size, settings)
    if not file.exists() or file.stat().st_size < size:
        with open(file, "wb") as scratch:
            os.posix_fallocate(scratch.fileno(), 0, size)
        mover.run("write")
    found = {kind: {"samples_s": [], "cpu_s": []} for kind in PASSES}
    for _ in range(rounds):
        for kind in PASSES:
            seconds, cpu = measured(lambda: mover.run(kind))
            found[kind]["samples_s"].append(seconds)
            found[kind]["cpu_s"].append(cpu)
    return found


def best_settings(contender, file, size):
    """Returns the settings of the sweep with the least time for passes of all kinds together."""
    def seconds(settings):
        return sum(kind["samples_s"][0] for kind in passes(contender, settings, file, size, rounds=1).values())
    return min(contender.SETTINGS, key=seconds)


def move(options, contender, settings):
    folder = pathlib.Path(options.dir) / f"peers.{os.getpid()}"
    folder.mkdir()
    try:
        if settings is None:
            settings = best_settings(contender, folder / "sweep", min(SWEEP_BYTES, options.bytes))
        text = ", ".join(f"{name} {value}" for name, value in settings.items())
        return {"bytes": options.bytes, "settings": text} | passes(contender, settings, folder / "file", options.bytes,
                                                                   options.rounds)
    finally:
        shutil.rmtree(folder)


def swapped_steps(options):
    """Calls the swapper as DeepSpeed's stage 3 does, for one group of parameters after another."""
    import torch
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
    from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
    deepspeed.init_distributed("gloo", verbose=False)
    part = 16 * MIB  # number of elements in one group of parameters
    count = max(1, options.numel // part)
    parameters = []
    for number in range(count):
        parameter = torch.nn.Parameter(torch.zeros(part))
        parameter.ds_id = str(number)
        parameters.append(parameter)
    optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **ADAMW)
    folder = pathlib.Path(options.dir) / f"peers.{os.getpid()}"
    folder.mkdir()
    try:
        config = types.SimpleNamespace(buffer_count=5 * 3, pipeline_read=True, pipeline_write=True, fast_init=False)
        swapper = PipelinedOptimizerSwapper(config, get_aio_config({}), str(folder), optimizer, part, "cpu",
                                            torch.float32, timers=None)
        swapper.initialize_parameters(parameters=parameters, src_tensors=[torch.randn(part) for _ in parameters])
        gradient = torch.randn(part) * 1e-3
        group, = optimizer.param_groups

        def step():
            for number, parameter in enumerate(parameters):
                following = parameters[number + 1] if number + 1 < count else None
                swapper.swap_in_optimizer_state(parameter=parameter, async_parameter=following)
                parameter.grad = gradient
                group["params"] = [parameter]
                optimizer.step()
                group["params"] = []
                parameter.grad = None
                swapper.swap_out_optimizer_state(parameter=parameter, async_swap=following is not None)

        samples = [measured(step)[0] for _ in range(2 + options.rounds)][2:] # the first two write what later steps read
        return {"numel": count * part, "bytes": 2 * 12 * count * part, "memory_bytes": config.buffer_count * 4 * part,
                "samples_s": samples}
    finally:
        shutil.rmtree(folder)


CONTENDERS = {"fio": lambda options: move(options, Fio, None),
              "deepspeed_aio": lambda options: move(options, DeepSpeedAio, DEFAULTS),
              "deepspeed_aio_best": lambda options: move(options, DeepSpeedAio, None),
              "deepspeed_swapper": swapped_steps}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--dir", required=True, help="directory on the disk")
    parser.add_argument("--bytes", type=int, default=8 << 30, help="of a pass, one way")
    parser.add_argument("--numel", type=int, default=64 << 20, help="parameters of a step")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    with standard_output() as emit:
        emit({"peer": options.contender} | CONTENDERS[options.contender](options))


if __name__ == "__main__":
    main()
