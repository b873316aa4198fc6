"""Runs tasks by turns within a budget. What fails or no longer fits is noted, and the others go on."""

import dataclasses
import subprocess
from typing import Callable


def last_line(text):
    """Where a program that fails says why."""
    return (text.strip().splitlines() or [""])[-1]


@dataclasses.dataclass(frozen=True)
class Task:
    key: str                        # "steps/gpt_124m/torch_ddp"
    what: str                       # the same for people
    estimate_s: float               # how long it takes, as long as it has not run
    limit_s: float                  # after so long it has failed
    run: Callable[[float], None]    # called with the seconds it may take


class Schedule:
    """`failed` and `not_run`: [{"key", "what", "round", "why"}]. Rounds count from 1: that in which it failed, or from
    which on it was not run."""

    def __init__(self, budget, say):
        self.failed = []
        self.not_run = []
        self._budget = budget
        self._say = say
        self._took = {}

    def run(self, tasks, rounds, after_each=lambda: None):
        """Every task once, in order of importance; then all of them again, until `rounds` are done. A task that has
        failed or did not fit is not tried again: the time left only becomes less."""
        for number in range(1, rounds + 1):
            for task in tasks:
                if all(entry["key"] != task.key for entry in self.failed + self.not_run):
                    self._run(task, number)
                    after_each()

    def _run(self, task, number):
        refusal = self._budget.refusal(self._took.get(task.key, task.estimate_s))
        if refusal:
            return self._note(self.not_run, task, number, refusal)
        begin, left = self._budget.spent(), self._budget.left()
        try:
            task.run(min(task.limit_s, left))
        except Exception as failure:  # whatever it is, what the others measure is not lost
            if isinstance(failure, subprocess.TimeoutExpired) and left < task.limit_s:
                self._note(self.not_run, task, number, f"it did not end in the {left:.0f} s that were left")
            else:
                self._note(self.failed, task, number, f"{type(failure).__name__}: {failure}")
        self._took[task.key] = self._budget.spent() - begin

    def _note(self, entries, task, number, why):
        entries.append({"key": task.key, "what": task.what, "round": number, "why": why})
        verb = "failed" if entries is self.failed else "not run"
        self._say(f"{verb}: {task.what}, round {number}: {last_line(why)}")
