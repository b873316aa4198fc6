"""Has the code that host, network and GPU runs share: results, contenders, and failures. It uses the standard library
only."""

import datetime
import math
import os
import pathlib
import re
import shlex
import sys

import checks
import contenders
import machine
import results
from schedule import Budget, Schedule
from works import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
EXIT_FAILED, EXIT_UNAVAILABLE, EXIT_SKIPPED = 1, 69, 77
CHECK_STEPS = 5


def say(text):
    print(f"benchmarks/run: {text}", flush=True)


def without_paths(text):
    """Returns the text with the names of files instead of their paths, since results are shown on other machines,
    too."""
    return re.sub(r"(?<![\w./:])/(?:[\w.+@-]+/)*([\w.+@-]+)", r"\1", text)


def binary(folder="build/release"):
    """Returns the path of the command to measure. Raises SystemExit if it is not built."""
    path = os.environ.get("TESSERA_BIN", str(REPOSITORY / folder / "app/tessera"))
    if not os.path.exists(path):
        say(f"{path} is not there. hint: build it (scripts/test), or set TESSERA_BIN")
        raise SystemExit(EXIT_UNAVAILABLE)
    return path


class Benchmark:
    """One run of everything that the command line asks for. `results` holds the measurements of this run (results.py
    describes them), and `earlier` the results to which they are added."""

    def __init__(self, options, path, sections, works, names, versions, budget_s=None, commit=None, **of_run):
        """`path`: the file of results; `names`: the contenders that take part; `of_run`: further facts about this
        run."""
        self.options = options
        self.path = path
        self.sections = sections
        self.schedule = Schedule(say, Budget(budget_s or math.inf))
        self._noted = {"failed": [], "not_run": []}
        command = [f"benchmarks/{pathlib.Path(sys.argv[0]).name}", *map(without_paths, sys.argv[1:])]
        self.results = {
            "schema": results.SCHEMA, "where": options.where, "quick": bool(options.quick), "versions": versions,
            "runs": [{"command": shlex.join(command), "sections": list(sections), "rounds": options.rounds, "seconds": 0.0,
                      "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                      "commit": commit or machine.commit(), "machine": machine.facts(), "budget_s": budget_s} | of_run],
            "works": [work.facts() for work in works],
            "contenders": [contenders.CONTENDERS[name].facts() for name in names],
            "steps": [], "checks": []} | self._noted
        self.earlier = results.read(path) if options.add else None
        if self.earlier and self.earlier["quick"] != self.results["quick"]:
            raise SystemExit(f"run: --add: {path.name} is of another kind: only one of both is a smoke test. hint: leave --add out")

    def entry(self, section, **key):
        """Returns the entry of results[section] with these fields. Makes a new entry if there is none."""
        for entry in self.results.setdefault(section, []):
            if all(entry[name] == value for name, value in key.items()):
                return entry
        self.results[section].append(dict(key))
        return self.results[section][-1]

    def add(self, section, key, **rounds):
        """Adds a round to the lists of an entry, and returns the entry."""
        entry = self.entry(section, **key)
        for name, of_round in rounds.items():
            entry.setdefault(name, []).append(of_round)
        return entry

    def check(self, work, who, check):
        """Records the result of `check()`. Raises checks.CheckFailed if it fails."""
        try:
            result = f"{who}{check()}"
        except checks.CheckFailed as failure:
            raise checks.CheckFailed(f"{work}: {who}{failure}") from None
        say(f"{work}: {result}")
        self.results["checks"].append({"work": work, "result": result})

    def note(self, section, key, what, why):
        """Records a task outside of the rounds that failed or was not run. `section`: "failed" or "not_run"."""
        self._noted[section].append({"key": key, "what": what, "round": None, "why": why})

    def save(self):
        """Writes the results, and returns them with the results to which they are added."""
        self.results["runs"][-1]["seconds"] = self.schedule.budget.spent()
        for name, entries in (("failed", self.schedule.failed), ("not_run", self.schedule.not_run)):
            self.results[name] = [entry | {"why": without_paths(entry["why"])} for entry in self._noted[name] + entries]
        whole = results.added(self.earlier, self.results, self.sections) if self.earlier else self.results
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return results.write(self.path, whole)


def add_arguments(parser, out, rounds):
    """Adds the arguments that host, network and GPU runs have in common."""
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results" / out, metavar="FOLDER", help="for what is written")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"of every contender ({rounds}; quick: 1)")


def chosen(parser, options, names, default=None):
    """Returns the `names` that --only selects. Ends with an error if --only has an unknown name."""
    if unknown := sorted(set(options.only or []) - set(names)):
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(names)}")
    return [name for name in names if name in (options.only or default or names)]


def rounds_of(parser, options, full):
    rounds = options.rounds if options.rounds is not None else 1 if options.quick else full
    if rounds < 1:
        parser.error("--rounds must be 1 or more")
    return rounds
