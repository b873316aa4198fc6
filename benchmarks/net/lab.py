"""Starts contenders on hosts of scripts/net_lab, with one process per rank and one thread in each. It uses the standard
library only.

rank.py starts each rank, stores its output, and counts the bytes of its host's link. Collectives keep the ranks at the
same step, so rank 0's steps take as long as the steps of all ranks.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import ranks
from harness import EXIT_FAILED, EXIT_SKIPPED, FOLDER, say, without_paths
from launch import Launcher, built_package, steps_of
from net.rates import bits_per_s
from works import REPOSITORY

NET_LAB = REPOSITORY / "scripts/net_lab"
SKIPPED, TIMED_OUT = 77, 124
LINES_OF_ERROR = 12


class Failed(ranks.ContenderFailed):
    """A contender did not train as it should have, or another command failed. The text has the reason."""


class Skipped(BaseException):
    """This machine cannot make hosts. The text has the reason. This is no failure of a task: nothing else can be
    measured either."""


def lab(hosts, ranks_per_host, rate, timeout_s, command, more=None):
    """Runs `command` once for each rank, on hosts that are made for this call and removed afterwards. `more`: variables
    that are added to the environment. Returns (code, output, errors)."""
    words = [sys.executable, NET_LAB, "run", "--hosts", hosts, "--rate", rate, "--ranks-per-host", ranks_per_host,
             "--timeout", f"{timeout_s:.0f}", "--", *command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"} | (more or {})
    process = subprocess.Popen([str(word) for word in words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, env=environment)
    try:
        # The command of net_lab ends by itself after timeout_s. It gets 60 s more to make and remove the hosts.
        output, said = process.communicate(timeout=timeout_s + 60)
    except subprocess.TimeoutExpired:
        raise Failed(f"the hosts were not removed {timeout_s + 60:.0f} s after they were asked for") from None
    finally:
        if process.poll() is None:
            process.terminate()  # the lab then ends its ranks and removes its hosts
            process.wait(60)
    if process.returncode == SKIPPED:
        raise Skipped(said.strip())
    return process.returncode, output, said


def measured_on_hosts(shapes, measure):
    """Returns (0, the result of `measure`). If hosts cannot be made, prints the reason and returns (an exit code,
    None).

    `shapes`: (hosts, rate) of each kind of hosts that `measure` needs. Each is made once before `measure` is called."""
    ranks.let_signals_end_ranks()
    try:
        for hosts, rate in shapes:
            code, _, said = lab(hosts, 1, rate, 30, ["true"])
            if code != 0:
                say(f"{NET_LAB.name} failed with exit code {code}: {said.strip()}")
                return EXIT_FAILED, None
        return 0, measure()
    except Skipped as skipped:
        say(f"skipped: {str(skipped).strip().splitlines()[0]}")
        return EXIT_SKIPPED, None


def wire_speed(hosts, rate, seconds):
    """Returns {"one_way", "both_ways"}: bytes per second that one TCP connection carries between two hosts."""
    code, output, said = lab(hosts, 1, rate, 60 + 3 * seconds,
                             [sys.executable, FOLDER / "net/wire.py", "--seconds", seconds])
    if code != 0:
        raise Failed(f"the wire's own speed could not be measured, exit code {code}: {without_paths(said.strip())}")
    lines = [json.loads(line) for line in output.splitlines()]
    return {"one_way": next(line["one_way"] for line in lines if line["one_way"]),
            "both_ways": min(line["both_ways"] for line in lines)}


class LabLauncher(Launcher):
    """Runs contenders on a workload. `hosts` and `ranks_per_host` hold for all contenders except those that train
    alone."""

    def __init__(self, binary, pythons, work, hosts, ranks_per_host):
        super().__init__(binary, pythons)
        self.work = work
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.rate = "unlimited"

    def strategy(self, contender, work):
        """Returns the strategy of a contender. All its calls go directly: the formulas and plans with which bytes and
        seconds are compared assume direct calls, and a measurement at the start could choose others in each run."""
        return super().strategy(contender, work) | {"comm": {"network_fit": "direct"}}

    def timeout_s(self):
        """Returns the time limit in seconds. It is several times as long as the slowest contender should need, even on
        two cores that other processes use too."""
        steps = self.work.warm_up + self.work.steps
        busy = self.hosts * self.ranks_per_host / len(os.sched_getaffinity(0))
        wire = 8 * 4 * self.work.parameters() / (bits_per_s(self.rate) or 1e10)
        return 90 + steps * (5 * max(busy, 1) * self.work.batch + 4 * self.ranks_per_host * wire)

    def measure(self, contender, rate, side_by_side=1):
        """Returns {"samples_s", "losses", "link_bytes"}. These are the seconds of the timed steps, the losses of all
        steps, and {"sent", "received"} of the busiest host in a timed step (null for a rank that trains alone).
        `side_by_side`: how many lone ranks train at the same time. The seconds are then those of all lone ranks."""
        self.rate = rate
        with _folder() as folder:
            run = self.train(contender, self.work, folder, side_by_side if contender.alone else 1, self.timeout_s())
            links = [json.loads(file.read_text())["link"] for file in folder.glob("rank.*.json")]
            busiest = {way: max(link[way] for link in links if link) / self.work.steps
                       for way in ("sent", "received") if any(links)}
            samples = run.all_samples_s() if contender.alone else run.samples_s[0]
            return {"samples_s": samples, "losses": run.losses[0], "link_bytes": busiest or None}

    def start(self, contender, command, folder, count, limit_s, watch=None):
        if contender.alone:
            return super().start(contender, command, folder, count, limit_s, watch)
        work = self.work
        wrapper = [sys.executable, FOLDER / "net/rank.py", "--folder", folder, "--first", work.warm_up,
                   "--last", work.warm_up + work.steps, "--"]
        code, _, said = lab(self.hosts, self.ranks_per_host, self.rate, limit_s, wrapper + command, built_package(self.binary))
        trained = f"{len(steps_of(folder / 'metrics.0.jsonl'))} of {work.warm_up + work.steps} steps were done"
        if code == TIMED_OUT:
            raise Failed(f"not over after {limit_s:.0f} s; {trained}")
        if code != 0:
            raise Failed(f"exit code {code}; {trained}\n" + without_paths(said_by_first(folder) or said.strip()))

    def links(self, rate):
        """Returns the texts that `tessera doctor --links` writes: {"links"} for links between the hosts, and
        "links-inside" for one host if it has several ranks."""
        with _folder() as folder:
            file, inside = folder / "links.json", folder / "inside.json"
            code, _, said = lab(self.hosts, self.ranks_per_host, rate, 180, [self.binary, "doctor", "--links", file])
            if code != 0:
                raise Failed(f"the links could not be measured, exit code {code}: {without_paths(said.strip())}")
            found = {"links": file.read_text()}
            if self.ranks_per_host > 1:
                said_by([self.binary, "launch", "-n", self.ranks_per_host, "--", self.binary, "doctor", "--links", inside],
                        "the links of a host could not be measured")
                found["links-inside"] = inside.read_text()
            return found

    def profile(self, contender):
        """Returns the text that `tessera train --profile` writes. The method runs as many lone ranks at the same time
        as all hosts have together, since the hosts share one machine's cores and memory. The text comes from one of
        these ranks."""
        more = {key: value for key, value in contender.more.items() if key in ("units", "optimizer")}
        alone = dataclasses.replace(contender, more=more, group="alone")
        self.rate = "unlimited"
        with _folder() as folder:
            command = [*self.command(alone, self.work, folder), "--profile", folder / "profile.{rank}"]
            super().start(alone, command, folder, self.hosts * self.ranks_per_host, self.timeout_s())
            return (folder / "profile.0").read_text()

    def predicted(self, contender, links, profile):
        """Returns the seconds of a step that `tessera plan` predicts. `links`: the result of the method
        `links`."""
        return self._plan(contender, "no prediction", {"profile": profile} | links)["step"]["seconds"]

    def planned_bytes(self, contender):
        """Returns the bytes that a rank sends in a step, as `tessera plan` says."""
        return self._plan(contender, "no plan", {})["wire_bytes_of_a_rank"]

    def _plan(self, contender, error, more):
        """Returns the output of `tessera plan --json`. `more`: {option: the text of its file}; `error`: the first words
        of an error."""
        files = {"model": json.dumps(self.work.model), "strategy": json.dumps(self.strategy(contender, self.work))} | more
        with _folder() as folder:
            words = [self.binary, "plan", "--json", "--world-size", self.hosts * self.ranks_per_host, "--hosts", self.hosts]
            for name, text in files.items():
                (folder / name).write_text(text)
                words += [f"--{name}", folder / name]
            return json.loads(said_by(words, error))


@contextlib.contextmanager
def _folder():
    with tempfile.TemporaryDirectory() as folder:
        yield pathlib.Path(folder)


def said_by(words, what):
    """Returns the output of a command. The command may take at most a minute. `what` names the command in the error."""
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    except subprocess.TimeoutExpired:
        raise Failed(f"{what}: not over after 60 s") from None
    if done.returncode != 0:
        raise Failed(f"{what}, exit code {done.returncode}: {without_paths(done.stderr.strip())}")
    return done.stdout


def said_by_first(folder):
    """Returns the end of the output of the rank that failed first. The other ranks fail because that rank is gone."""
    ends = [json.loads(file.read_text()) | {"file": file} for file in folder.glob("rank.*.json")]
    failed = sorted((end for end in ends if end["code"] != 0), key=lambda end: end["ended"])
    if not failed:
        return ""
    file = failed[0]["file"].with_suffix(".err")
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip()][-LINES_OF_ERROR:]
    return "\n".join([f"rank {file.name.split('.')[1]}:", *lines])
