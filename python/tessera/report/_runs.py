"""Reads the files that `tessera train --metrics` or `--out` wrote (docs/metrics.md)."""

import json
import math
import os
import stat
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tessera._error import Error
from tessera._files import CORRUPT, MISSING, code_of

METRICS = "metrics.jsonl"
_LARGEST = 1e100  # larger numbers count as infinite, since no chart can show them


class Latency(NamedTuple):
    """The time that one kind of call took for one unit, over all calls since the process began."""

    call: str
    """"gather" or "reduce" """
    unit: str
    count: int
    p50_seconds: float
    p95_seconds: float
    p99_seconds: float
    max_seconds: float


@dataclass
class Run:
    """One run. If a restarted job repeated a step, the run has the step once, in its latest version."""

    name: str
    """the path that was given"""
    header: dict[str, Any] = field(default_factory=dict)
    """the first line of the file: ranks, strategy, model and others"""
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    """by number, ascending"""
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)
    """by the step after which they were made, ascending"""
    latencies: list[Latency] = field(default_factory=list)
    """those of the last step that has any"""
    starts: int = 0
    """how often the job was started"""
    is_cut: bool = False
    """whether the last line is not whole, as where the process was killed"""

    def column(self, key: str) -> list[tuple[int, float]]:
        """Returns pairs of a step and its number named `key`. Steps without this number are left out."""
        return _numbers(self.steps, key)

    def held_out(self) -> list[tuple[int, float]]:
        """Returns the losses on held-out data, by the step after which they were computed. A loss that was NaN has no
        number in the file."""
        return _numbers(self.evaluations, "eval_loss")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _numbers(lines: dict[int, dict[str, Any]], key: str) -> list[tuple[int, float]]:
    found = [(step, line[key]) for step, line in lines.items() if _is_number(line.get(key))]
    return [(step, math.inf if value > _LARGEST else -math.inf if value < -_LARGEST else float(value)) for step, value in found]


def _latency(line: dict[str, Any]) -> Latency:
    return Latency(*(kind(line[key]) for key, kind in Latency.__annotations__.items()))


def _take(run: Run, line: dict[str, Any], latest: dict[str, int]) -> None:
    """Adds a line to the run. `latest["step"]` is the step whose latencies the run has."""
    match line.get("event"):
        case "start":
            run.starts += 1
            run.header = run.header or line
        case "evaluation":
            run.evaluations[int(line["after_step"])] = line
        case "latency":
            if latest.setdefault("step", int(line["after_step"])) != int(line["after_step"]):
                latest["step"] = int(line["after_step"])
                run.latencies.clear()
            run.latencies.append(_latency(line))
        case None:
            step = int(line["step"])
            run.steps.pop(step, None)  # a restarted job repeats steps; the sort moves them to their place
            run.steps[step] = line


def _lines(path: str) -> list[str]:
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY), encoding="utf-8") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise Error(f"{path} is a pipe, a device or a socket, want a regular file. "
                            "[T1078] hint: name a folder of tessera train --out, or a file of --metrics that is no table", CORRUPT)
            return file.readlines()
    except UnicodeDecodeError as error:
        raise Error(f"{path} is no text in UTF-8, want lines of JSON. "
                    "[T0798] hint: name a folder of tessera train --out, or a file of --metrics that is no table", CORRUPT) from error
    except OSError as error:
        raise Error(f"{path} cannot be read: {error.strerror}. "
                    "[T0799] hint: name a folder of tessera train --out, or a file of --metrics that is no table", code_of(error, MISSING)) from error


def read_run(path: str) -> Run:
    """Reads a run directory, or a metrics file of JSON lines. Raises Error: 66 if `path` does not exist, 65 if the file
    is damaged (the text names file and line). An incomplete last line is left out (`Run.is_cut`)."""
    name = os.path.join(path, METRICS) if os.path.isdir(path) else path
    run, latest, lines = Run(path), {}, _lines(name)
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            _take(run, line, latest)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if number == len(lines) > 1 and not text.endswith("\n"):
                run.is_cut = True
                break
            what = f"{type(error).__name__}: {error}"
            raise Error(f"{name}:{number}: is no line of metrics ({what}), want an object as docs/metrics.md lists them. "
                    "[T0800] hint: name a folder of tessera train --out, or a file of --metrics that is no table", CORRUPT) from error
    if not run.steps:
        raise Error(f"{name}: has no step. [T0801] hint: draw it when the first step has ended", CORRUPT)
    run.steps = dict(sorted(run.steps.items()))
    run.evaluations = dict(sorted(run.evaluations.items()))
    return run
