#!/usr/bin/env python3
"""Compares the steps of contenders, builds or settings whose ranks all exist at the same time and train in turn.

    benchmarks/turns.py tessera_no_shard torch_ddp
    benchmarks/turns.py --work narrow_24x64 --turn 0.4 tessera_full_shard@../before/build/release tessera_full_shard
    benchmarks/turns.py --work narrow_24x64 tessera_full_shard 'tessera_full_shard noise_scale={"every":50} --histogram-every 10'

A side is the name of a contender (contenders.py). A "@" and the build folder of another `tessera` may follow. Further
words are keys of the strategy with values in JSON that have no spaces, or arguments of `tessera train`.

benchmarks/run starts contenders one after the other. So minutes pass from one contender to the next, and the other load
of the machine changes in this time. Here the ranks of a side are stopped (SIGSTOP) while another side trains. A side
trains for a fraction of a second or a few seconds at a time (a turn), so all sides see the same machine. In each round
the median of one side is divided by the median of the other side. The ratio of two sides is the median of this ratio
over all rounds, and it has a 95 % interval. A step in which a side was stopped does not count.

All sides are in memory at the same time. The program uses the standard library only.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import sys
import tempfile
import time

import harness
import launch
import machine
import ranks
import stats
import works
from contenders import CONTENDERS
from works import REPOSITORY

STEPS = 100_000     # no side makes so many steps before it is ended
START_LIMIT_S = 300


def say(text):
    print(f"benchmarks/turns: {text}", flush=True)


class Side:
    """One side of the comparison: the ranks of a contender. They are stopped except in their own turns."""

    def __init__(self, words):
        self.words = words
        name, *more = words.split()
        name, _, folder = name.partition("@")
        if name not in CONTENDERS:
            raise SystemExit(f"turns.py: unknown contender {name}. hint: there are {', '.join(sorted(CONTENDERS))}")
        self.contender = CONTENDERS[name]
        self.folder = folder or "build/release"
        keys = [word for word in more if re.match("[a-z_]+=", word)]
        self.keys = {key: json.loads(value) for key, _, value in (word.partition("=") for word in keys)}
        self.arguments = [word for word in more if word not in keys]
        self.turns = []  # the samples of each turn, in seconds
        self._processes = []

    def start(self, work, count, python, scratch):
        """Starts the ranks, waits until rank 0 has made more steps than the workload's warm-up has, and stops them."""
        contender = dataclasses.replace(self.contender, more=self.contender.more | self.keys)
        work = dataclasses.replace(work, steps=STEPS, cool_down=0)
        launcher = launch.Launcher(harness.binary(self.folder), {contender.family: python})
        scratch.mkdir()
        command = [*launcher.command(contender, work, scratch), *self.arguments]
        self._scratch = scratch
        for number, environment in enumerate(launcher.environments(contender, count)):
            self._processes.append(ranks.start(command, number, environment, scratch))
        self._metrics = scratch / "metrics.0.jsonl"
        self._wait_until(lambda: len(launch.steps_of(self._metrics)) > work.warm_up, f"{work.warm_up + 1} steps")

    def _wait_until(self, has_begun, steps):
        """Waits until `has_begun` returns True, and stops the ranks. Raises ContenderFailed if they do not make `steps`
        in time."""
        begun = time.monotonic()
        while not has_begun():
            self.check()
            if time.monotonic() - begun > START_LIMIT_S:
                raise ranks.ContenderFailed(f"{self.words} made no {steps} in {START_LIMIT_S} s")
            time.sleep(0.1)
        self.pause()

    def pause(self):
        self._signal(signal.SIGSTOP)

    def check(self):
        """Raises ContenderFailed if a rank has ended."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise ranks.ended(process, number, self._scratch)

    def take_turn(self, seconds):
        """Lets the ranks train for some time, and stores the samples of the steps that were not interrupted."""
        before = len(launch.steps_of(self._metrics))
        self._train(seconds)
        self.turns.append(whole_steps(launch.steps_of(self._metrics), before))

    def _train(self, seconds, held=contextlib.nullcontext()):
        """Lets the ranks run for some time, while the context manager `held` is open. Raises ContenderFailed if one has
        ended."""
        self._signal(signal.SIGCONT)
        with held:
            time.sleep(seconds)
        self.pause()
        self.check()

    def end(self):
        ranks.end(self._processes)

    def _signal(self, which):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, which)


def whole_steps(steps, before):
    """Returns the seconds of the steps of a turn. The first `before` of `steps` existed when the turn began. The step
    after them began in an earlier turn, so it contains the time for which its ranks were stopped."""
    return [step["seconds"] for step in steps[before + 1:]]


def ratios(turns, reference):
    """Returns a ratio for each round in which both sides have steps. It is the median of the turn divided by the median
    of the reference's turn."""
    return [stats.median(mine) / stats.median(theirs) for mine, theirs in zip(turns, reference) if mine and theirs]


def table(sides):
    """Returns the lines of a Markdown table in which all sides are compared with the first side."""
    lines = ["| side | steps | median ms | p10 | p90 | ratio to the first | 95 % interval |", "|---|---|---|---|---|---|---|"]
    for side in sides:
        samples = [1e3 * sample for turn in side.turns for sample in turn]
        if not samples:
            lines.append(f"| {side.words} | 0 | | | | | |")
            continue
        of_turns = ratios(side.turns, sides[0].turns)
        low, high = stats.interval_of_median(of_turns)
        of_all = stats.summary(samples)
        lines.append(f"| {side.words} | {of_all['n']} | {of_all['median']:.2f} | {of_all['p10']:.2f} | {of_all['p90']:.2f} | "
                     f"{stats.median(of_turns):.4f} | {low:.4f} to {high:.4f} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = {work.name: work for quick in (False, True) for work in (*works.of_host(quick), works.of_python(quick))}
    parser.add_argument("--work", choices=choice, default="gpt_69m_fp32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40, help="turns of each side")
    parser.add_argument("--turn", type=float, default=5, help="seconds of a turn; several steps should fit into it")
    parser.add_argument("sides", nargs="+", metavar="SIDE")
    options = parser.parse_args()
    ranks.let_signals_end_ranks()
    sides = [Side(words) for words in options.sides]
    pythons = [folder / ".venv/bin/python" for folder in (harness.FOLDER, REPOSITORY)]  # benchmarks/setup makes the first one
    python = next((path for path in pythons if path.exists()), sys.executable)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        for number, side in enumerate(sides):
            stack.callback(side.end)
            side.start(choice[options.work], options.ranks, python, pathlib.Path(scratch) / str(number))
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else reversed(sides):
                side.take_turn(options.turn)
    say(f"{options.work}, {options.ranks} ranks, {options.rounds} turns of {options.turn:g} s a side, commit {machine.commit()['hash'][:7]}, "
        f"{machine.cpu_model()}")
    print("\n".join(table(sides)))


if __name__ == "__main__":
    main()
