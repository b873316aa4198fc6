"""Runs tasks in turn, within a budget of time. A task that fails or no longer fits into the budget is recorded, and the
other tasks still run. It uses the standard library only."""

import dataclasses
import math
import subprocess
import time
from typing import Callable

from ranks import ContenderFailed


def last_line(text):
    """Returns the last line of a program's output. A program that fails prints the reason there."""
    return (text.strip().splitlines() or [""])[-1]


class Budget:
    """A budget of seconds, which starts when the object is made. `clock` counts seconds."""

    def __init__(self, seconds=math.inf, clock=time.monotonic):
        self.seconds = seconds
        self._clock = clock
        self._begin = clock()

    def spent(self):
        return self._clock() - self._begin

    def left(self):
        return max(self.seconds - self.spent(), 0.0)

    def refusal(self, wanted_s):
        """Returns the reason why a task that takes about `wanted_s` is not begun. Returns None if it fits into the
        budget."""
        if wanted_s <= self.left():
            return None
        return f"{self.left():.0f} s of {self.seconds:.0f} were left, and it takes about {wanted_s:.0f}"


@dataclasses.dataclass(frozen=True)
class Task:
    key: str                        # a section of --only and the measured contender, such as "gpt_124m/torch_ddp"
    what: str                       # name of the task for readers
    run: Callable[[float], None]    # called with the seconds that it may take
    estimate_s: float = 0.0         # expected time, used until the task has run once
    limit_s: float = math.inf       # time after which it counts as failed


class Schedule:
    """`failed` and `not_run`: [{"key", "what", "round", "why"}]. Rounds count from 1. The round is that in which the
    task failed, or the first round in which it was not run.

    `most_failures`: a task that failed this many times is not tried again.
    """

    def __init__(self, say, budget=None, most_failures=1):
        self.failed = []
        self.not_run = []
        self.round = 1
        self._say = say
        self.budget = budget or Budget()
        self.most_failures = most_failures
        self._took = {}

    def run(self, tasks, rounds=1, after_each=lambda: None):
        """Runs every task once, in order, and then all of them again, until `rounds` are done."""
        for number in range(1, rounds + 1):
            self.run_round(tasks, number, after_each)

    def run_round(self, tasks, number, after_each=lambda: None):
        """Runs a round. A task that did not fit is not tried again, since the remaining time only becomes less."""
        self.round = number
        for task in tasks:
            failures = sum(entry["key"] == task.key for entry in self.failed)
            if failures < self.most_failures and all(entry["key"] != task.key for entry in self.not_run):
                self._run(task)
                after_each()

    def note_failure(self, key, what, why):
        """Records a failure of a part of a task, or of something that is no task."""
        self._note(self.failed, key, what, why)

    def _run(self, task):
        refusal = self.budget.refusal(self._took.get(task.key, task.estimate_s))
        if refusal:
            return self._note(self.not_run, task.key, task.what, refusal)
        begin, left = self.budget.spent(), self.budget.left()
        try:
            task.run(min(task.limit_s, left))
        except Exception as failure:  # a failure must not lose the results of other tasks
            if isinstance(failure, subprocess.TimeoutExpired) and left < task.limit_s:
                self._note(self.not_run, task.key, task.what, f"it did not end in the {left:.0f} s that were left")
            else:
                kind = "" if isinstance(failure, ContenderFailed) else f"{type(failure).__name__}: "
                self._note(self.failed, task.key, task.what, f"{kind}{failure}")
        self._took[task.key] = self.budget.spent() - begin

    def _note(self, entries, key, what, why):
        entries.append({"key": key, "what": what, "round": self.round, "why": why})
        verb = "failed" if entries is self.failed else "not run"
        self._say(f"{verb}: {what}, round {self.round}: {last_line(why)}")
