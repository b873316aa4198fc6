#!/usr/bin/env python3
"""Measures the figures that have targets for ranks that do not wait for each other, and fills the table of targets in
results/asynchronous.md.


    benchmarks/asynchronous_targets.py --page                        all of them: about 20 minutes on two cores that do nothing else
    benchmarks/asynchronous_targets.py --only quotas deal --page     some of them; the others stay as they were
    benchmarks/asynchronous_targets.py --only --page                 fills the page with what the results have
    benchmarks/asynchronous_targets.py --only soak --soak 200        kills and joins, as many as the number says
    benchmarks/asynchronous_targets.py --quick                       a few steps and kills, as a smoke test whose figures have no meaning

Results are in results/asynchronous_targets.json.xz. Without --page the table is printed. The sections are:

* `quotas`, `hogwild`, `deal`: sides whose ranks all exist at the same time and train by turns, as in turns.py. A side's
  speed in a turn is the sum of its ranks' speeds. The speed of a rank is its steps per second between the ends of its
  first and last step in the turn.
* `wire`: a worker on one host and a parameter server on another host of scripts/net_lab. The worker's compute is a
  timed sleep.
* `soak`: workers and parameter servers that are killed, and workers that join. Each parameter counts how often a step was applied to it, so
  a step that is lost or applied twice is seen in the values.

A rank may have only a part of a core. A cgroup then limits the rank. If no cgroup can be made, this program stops and
continues the rank again and again. The program itself uses the standard library only; its roles also need torch and
tessera. The program exits with 1 if the soak finds a fault. It does not judge any figure.
"""

import argparse
import collections
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import typing

import harness
import large_batch
import machine
import ranks
import results
import stats
import turns
from harness import FOLDER
from launch import built_package
from net import lab
from net.rank import link_bytes

THIS = pathlib.Path(__file__).resolve()
PAGE, RESULTS = "asynchronous.md", "asynchronous_targets.json.xz"
CGROUPS, PERIOD_S = pathlib.Path("/sys/fs/cgroup"), 0.05
SECRET = "asynchronous_targets.py"   # servers listen on the loopback address, or on a host of scripts/net_lab
ADAMW = {"optimizer": {"type": "adamw", "lr": 1e-3}, "units": {"classes": ["Block"]}, "comm": {"timeout_s": 600}}
ALONE = ADAMW | {"strategy": "NO_SHARD"}
SHARDED = ADAMW | {"strategy": "SHARD_OPTIMIZER"}
MICROBATCHES = 24
DEALT = SHARDED | {"gradient_sync": "last_microbatch"}


class Side(typing.NamedTuple):
    label: str
    strategy: dict
    alone: bool = False    # whether each rank is a job of its own
    worth: int = 1         # how many steps a step of one rank counts as, since a step of another side may be smaller


class Compared(typing.NamedTuple):
    """Sides that train by turns, and the ratios of their speeds that are wanted."""

    about: str
    sides: dict
    rows: tuple            # (what, side, side, wanted ratio of the first side's speed to the second side's)
    batch: int             # sequences of a microbatch
    turn_s: float
    rounds: int
    ranks: int = 2
    shares: tuple = ()     # parts of a core, one for each rank


COMPARED = {
    "quotas": Compared(
        "4 ranks",
        {"synchronous": Side("synchronous", SHARDED), "asynchronous": Side("asynchronous", SHARDED | {"sync": {"type": "asynchronous"}}),
         "alone": Side("each by itself", ALONE, alone=True)},
        (("steps/s of all ranks, asynchronous over synchronous", "asynchronous", "synchronous", "at least 1.6; ideal 1.75"),
         ("steps/s of four trainings side by side over synchronous", "alone", "synchronous",
          "the ideal on this machine: 1.75 where cores do not slow each other down"),
         ("steps/s, asynchronous over four trainings side by side", "asynchronous", "alone", "1 is ideal")),
        batch=64, turn_s=10, rounds=8, ranks=4, shares=(0.5, 0.5, 0.5, 0.25)),
    "hogwild": Compared(
        "2 ranks of one thread",
        {"alone": Side("two trainings that have nothing in common", ALONE, alone=True),
         "hogwild": Side("Hogwild", SHARDED | {"sync": {"type": "hogwild"}})},
        (("samples/s, Hogwild over two trainings side by side", "hogwild", "alone", "at least 0.95"),),
        batch=8, turn_s=2, rounds=40),
    "deal": Compared(
        f"2 ranks, {MICROBATCHES} microbatches a step",
        {"alone": Side("each by itself", ALONE | {"gradient_accumulation": MICROBATCHES}, alone=True, worth=2),
         "dealt": Side("deal by speed", DEALT | {"deal": {"by": "speed", "microbatches": MICROBATCHES, "window": 4}}),
         "even": Side("without the deal", DEALT | {"gradient_accumulation": MICROBATCHES // 2})},
        (("time of a step over the ideal for these speeds, deal by speed", "alone", "dealt", "at most 1.15"),
         ("the same without the deal", "alone", "even", "1.5 to 2.0 is expected")),
        batch=8, turn_s=8, rounds=10, shares=(0.5, 0.25)),
}
WIRE = {"rate": "1gbit", "parameters": 1 << 23, "units": [1, 8, 16], "compute_s": 1.2, "rounds": 7}
WIRE_QUICK = WIRE | {"parameters": 1 << 18, "units": [1, 8], "compute_s": 0.06, "rounds": 1}
SECTIONS = (*COMPARED, "wire", "soak")


def say(text):
    print(f"asynchronous_targets.py: {text}", flush=True)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION",
                        help=f"{', '.join(SECTIONS)}; none of them: the table of what was measured earlier")
    parser.add_argument("--scale", type=float, default=1.0, metavar="S", help="multiplies parts of a core, for a machine that does other work, "
                        "too: 0.3")
    parser.add_argument("--soak", type=int, default=None, metavar="N", help="kills and joins of the section soak (200; quick: 6)")
    parser.add_argument("--seed", type=int, default=1, help="of the soak: what happens when")
    parser.add_argument("--quick", action="store_true", help="a smoke test")
    parser.add_argument("--page", action="store_true", help=f"fills the table of {PAGE} in --out")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results", metavar="FOLDER", help=f"of {RESULTS}")
    options = parser.parse_args()
    if options.soak is None:
        options.soak = 6 if options.quick else 200
    if options.soak < 1:
        parser.error("--soak must be 1 or more")
    if not 0.05 <= options.scale <= 1:
        parser.error("--scale must be from 0.05 to 1")
    return options


# These classes limit processes to a part of a core, and let them train by turns.

class Quotas:
    """Limits processes to parts of a core. It is a context manager for all turns, and `running` is one for each
    turn."""

    def __init__(self, of_pids):
        """`of_pids`: {process id: part of a core}."""
        self._of_pids = of_pids
        self._groups = []

    def __enter__(self):
        try:
            for pid, share in self._of_pids.items():
                self._limit(pid, [round(1e6 * PERIOD_S * part) for part in (share, 1)])
        except OSError:
            self._leave_groups()
        return self

    def _limit(self, pid, quota_and_period):
        """Puts a process into a group of its own. Raises OSError if this machine lets us make none."""
        quota, period = map(str, quota_and_period)
        if (CGROUPS / "cpu/cpu.cfs_quota_us").exists():
            folder, limits = CGROUPS / "cpu", {"cpu.cfs_period_us": period, "cpu.cfs_quota_us": quota}
        elif (CGROUPS / "cgroup.controllers").exists():
            folder, limits = CGROUPS, {"cpu.max": f"{quota} {period}"}
        else:
            raise FileNotFoundError(CGROUPS)
        self._groups.append(group := folder / f"tessera-{pid}")
        group.mkdir()
        for name, text in (limits | {"cgroup.procs": str(pid)}).items():
            (group / name).write_text(text)

    def __exit__(self, *_):
        self._leave_groups()

    def _leave_groups(self):
        """Removes the groups. Their processes continue without a limit."""
        for group in self._groups:
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    (group.parent / "cgroup.procs").write_text(pid)
            with contextlib.suppress(OSError):
                group.rmdir()
        self._groups = []

    def how(self):
        return "" if not self._of_pids else "held by cgroups" if self._groups else "stopped and continued by signals"

    @contextlib.contextmanager
    def running(self):
        """Returns a context. While it is open, processes without a group are stopped and continued in turn."""
        over = threading.Event()
        turns_of = [] if self._groups else [threading.Thread(target=self._take_turns, args=(pid, share, over))
                                            for pid, share in self._of_pids.items()]
        for each in turns_of:
            each.start()
        try:
            yield
        finally:
            over.set()
            for each in turns_of:
                each.join()

    @staticmethod
    def _take_turns(pid, share, over):
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                for number, seconds in ((signal.SIGCONT, share * PERIOD_S), (signal.SIGSTOP, (1 - share) * PERIOD_S)):
                    os.killpg(pid, number)
                    over.wait(seconds)


class TurnsOfSide(turns.Side):
    """The ranks of a side, which train for ever. They are stopped except in their own turns."""

    def __init__(self, side, compared):
        self.side, self.compared, self.words = side, compared, side.label
        self.turns = []          # the speed in each turn, or None where a rank ended fewer than two steps
        self._processes = []
        self._quotas = Quotas({})

    def start(self, scratch, package, stack):
        """Starts the ranks, waits until each has made some steps, and stops them."""
        scratch.mkdir()
        self._scratch = scratch
        count = self.compared.ranks
        command = [sys.executable, THIS, "role", "train", json.dumps(self.side.strategy), self.compared.batch, scratch / "steps.{rank}"]
        environments = [{}] * count if self.side.alone else ranks.rank_environments(count)
        for number, environment in enumerate(environments):
            self._processes.append(ranks.start(command, number, environment | package, scratch))
        self._wait_until(lambda: all(len(self._ends(number)) > 1 for number in range(count)), "2 steps on each rank")
        self._quotas = stack.enter_context(Quotas(dict(zip((each.pid for each in self._processes), self.compared.shares))))

    def _ends(self, number):
        """Returns the moments at which a rank's steps have ended."""
        path = self._scratch / f"steps.{number}"
        return [float(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []

    def take_turn(self, seconds):
        begin = time.monotonic()
        self._train(seconds, self._quotas.running())
        speeds = [speed_of([end for end in self._ends(number) if end >= begin]) for number in range(self.compared.ranks)]
        self.turns.append(None if None in speeds else self.side.worth * sum(speeds))

    def how(self):
        return self._quotas.how()


def speed_of(ends):
    """Returns steps per second between the first and the last of the moments, or None if there are fewer than two."""
    return (len(ends) - 1) / (ends[-1] - ends[0]) if len(ends) > 1 else None


def ratios(one, other):
    """Returns, for each round in which both speeds are known, their ratio."""
    return [mine / theirs for mine, theirs in zip(one, other) if mine is not None and theirs is not None]


def compared_by_turns(name, options):
    """Returns {"speeds": {side: [of each round]}, "shares", "how"} of a section. The first round is left out,
    since deals and caches settle in it."""
    compared = COMPARED[name]
    compared = compared._replace(shares=tuple(options.scale * share for share in compared.shares))
    rounds, turn_s = (2, 2.0) if options.quick else (compared.rounds + 1, compared.turn_s)
    package = built_package(harness.binary())
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        sides = {key: TurnsOfSide(side, compared) for key, side in compared.sides.items()}
        for key, side in sides.items():
            groups = stack.enter_context(contextlib.ExitStack())  # removed when the processes have ended
            stack.callback(side.end)
            side.start(pathlib.Path(scratch) / key, package, groups)
        for number in range(rounds):
            for side in sides.values() if number % 2 == 0 else reversed(sides.values()):
                side.take_turn(turn_s)
        return {"speeds": {key: side.turns[1:] for key, side in sides.items()}, "shares": list(compared.shares),
                "how": next(iter(sides.values())).how()}


def compared_rows(name, found):
    """Returns (what, measured, wanted) of a section."""
    compared, about = COMPARED[name], COMPARED[name].about
    if found["shares"]:
        about += f" with {', '.join(f'{share:g}' for share in found['shares'])} of a core, {found['how']}"
    for what, one, other, wanted in compared.rows:
        of_rounds = ratios(found["speeds"][one], found["speeds"][other])
        if not of_rounds:
            yield f"{about}: {what}", "too few steps in a turn", wanted
            continue
        low, high = stats.interval_of_median(of_rounds)
        yield f"{about}: {what}", f"{stats.median(of_rounds):.3f} ({low:.3f} to {high:.3f})", wanted


# These functions measure pushes and pulls over a network.

def measured_wire(options):
    """Returns the sizes with "speed" (bytes/s of one connection), "wire_s" (seconds that a pull and a push of all
    parameters take at this speed) and "found" (the samples of the worker). Returns None if this machine cannot make
    hosts."""
    size = WIRE_QUICK if options.quick else WIRE

    def measure():
        speed = lab.wire_speed(2, size["rate"], 0.5 if options.quick else 3)["one_way"]
        with tempfile.TemporaryDirectory() as folder:
            code, output, said = lab.lab(2, 1, size["rate"], 300, [sys.executable, THIS, "role", "wire", json.dumps(size), folder],
                                         built_package(harness.binary()) | {"TESSERA_BIN": harness.binary()})
            if code != 0:
                raise lab.Failed(f"exit code {code}: {harness.without_paths(said.strip())}")
        return size | {"speed": speed, "wire_s": 2 * 4 * size["parameters"] / speed, "found": json.loads(output)}

    code, found = lab.measured_on_hosts([(2, size["rate"])], measure)
    if code not in (0, harness.EXIT_SKIPPED):
        raise SystemExit(code)
    return found


def wire_rows(found):
    wire, of_parameters = found["wire_s"], 4 * found["parameters"]
    for row in found["found"]:
        middle = {name: stats.median(row[name]) for name in ("moved", "moved_alone", "computed", "computed_alone")}
        units = f"{row['units']} unit{'s' * (row['units'] > 1)} of {of_parameters / row['units'] / 2**20:g} MiB"
        about = f"a worker and a server on two hosts, {found['rate']}, {units}"
        pulled, pushed = (row["link"][way] / of_parameters for way in ("received", "sent"))
        yield (f"{about}: push and pull over the wire's time for the bytes, {wire:.3f} s (pulled and pushed: {pulled:.3f} and {pushed:.3f} of "
               "the parameters' bytes)", f"{(middle['moved'] - middle['moved_alone']) / wire:.3f}", "at most 1.10")
        if row["units"] > 1:  # a single unit has no other compute to overlap with
            yield (f"{about}: exposed beside {found['compute_s']:g} s of compute, of the wire's time",
                   f"{(middle['computed'] - middle['computed_alone']) / wire:.3f}", "at most 0.10")


# These functions make the soak.

def soaked(options):
    """Returns the findings of the role `soak`."""
    with tempfile.TemporaryDirectory() as folder:
        limit_s = 300 + 30 * options.soak
        text = ranks.run_ranks([sys.executable, THIS, "role", "soak", options.soak, options.seed, folder, harness.binary()],
                               [built_package(harness.binary())], limit_s)[0]
    return json.loads(text.splitlines()[-1])


def faults_of(found):
    """Returns texts that say what is wrong with a soak."""
    faults = {"steps that were lost": found["lost"], "steps that were applied more often than the servers said": found["unsaid"],
              "numbers that no sum of steps gives": found["wrong"], "processes that ended by themselves": found["ends"],
              "hangs": found["hangs"]}
    return [f"{len(which)} {what}, such as {which[0]}" for what, which in faults.items() if which]


def soak_rows(found):
    events = ", ".join(f"{count} {name}" for name, count in found["events"].items())
    about = (f"soak, seed {found['seed']}: {sum(found['events'].values())} events ({events}), {found['steps']} steps of "
             f"{found['workers']} workers, {found['seconds']:.0f} s")
    good = (f"no hang, no wrong sum, no step lost. {len(found['again'])} steps were applied again to some shard, as the servers' log says of "
            f"workers that were killed amid a push; {len(found['named'])} workers ended with an error that names a server")
    yield about, "; ".join(faults_of(found)) or good, "no hang, no wrong sum, nothing lost that is not said"


ROWS = {name: (lambda found, name=name: compared_rows(name, found)) for name in COMPARED} | {"wire": wire_rows, "soak": soak_rows}


# These functions run in processes of their own, and need torch and tessera.

def role_train(strategy, batch, path):
    """Makes steps until it is killed, and writes the moment at which each step has ended."""
    import torch
    from torch.nn import functional

    import tessera
    from asynchronous_ranks import BYTES, SEQ_LEN, Language

    torch.set_num_threads(1)
    torch.manual_seed(1)
    strategy, model = json.loads(strategy), Language()
    engine = tessera.Engine(model, strategy)
    tokens = torch.randint(BYTES, (int(batch), SEQ_LEN + 1), generator=torch.Generator().manual_seed(2))
    with open(path, "w", buffering=1) as ends:
        while True:
            if "deal" in strategy:
                engine.microbatches()  # all ranks take the same samples, so the answer is not needed
            while not engine.step_is_due():
                engine.backward(functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
            engine.step()
            ends.write(f"{time.monotonic():.6f}\n")


def role_wire(size, folder):
    """Runs a parameter server on the first host, or a worker on the second host. The worker prints its samples."""
    size, over = json.loads(size), pathlib.Path(folder) / "over"
    host = os.environ["MASTER_ADDR"]
    if os.environ["RANK"] == "0":
        server = subprocess.Popen([os.environ["TESSERA_BIN"], "serve", "--listen", f"{host}:4711"], stdout=subprocess.DEVNULL,
                                  env=os.environ | {"TESSERA_SERVERS_SECRET": SECRET})
        while not over.exists() and server.poll() is None:
            time.sleep(0.1)
        server.kill()
        return
    for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # the worker is a job of its own
        os.environ.pop(name)
    os.environ |= {"TESSERA_SERVERS": f"{host}:4711", "TESSERA_SERVERS_SECRET": SECRET}
    try:
        print(json.dumps([wire_samples(size, units) for units in size["units"]]))
    finally:
        over.touch()


def wire_samples(size, units):
    """Returns the seconds of steps with and without compute, of a model on the server and of one without a server."""
    import torch

    import tessera

    class Sleep(torch.autograd.Function):
        """The computation of a unit; backward takes twice as long as forward."""

        @staticmethod
        def forward(context, x, seconds):
            context.seconds = seconds
            time.sleep(seconds)
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            time.sleep(2 * context.seconds)
            return gradient, None

    class Timed(torch.nn.Module):
        def __init__(self, numel):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(numel))

        def forward(self, x, seconds):
            return Sleep.apply(x + self.weight.sum(), seconds)

    def step_s(layers, seconds, backward, step):
        begin = time.perf_counter()
        x = torch.zeros(())
        for layer in layers:
            x = layer(x, seconds / 3 / units)
        backward(x)
        step()
        return time.perf_counter() - begin

    def clear(layers):
        for layer in layers:
            layer.weight.grad = None

    torch.set_num_threads(1)
    served, alone = (torch.nn.ModuleList(Timed(size["parameters"] // units) for _ in range(units)) for _ in range(2))
    engine = tessera.Engine(served, {
        "strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Timed"]}, "sync": {"type": "asynchronous", "owners": "servers"},
        "optimizer": {"type": "sgd", "lr": 1e-6, "momentum": 0.0, "weight_decay": 0.0}})
    link, found = os.environ["GLOO_SOCKET_IFNAME"], {"units": units}
    # Steps of the same kind follow each other. If kinds alternated, the transfers that a step leaves under way would
    # overlap with a step of another kind.
    for kind, seconds in (("moved", 0.0), ("computed", size["compute_s"])):
        for name, layers, backward, step in ((kind, served, engine.backward, engine.step),
                                             (f"{kind}_alone", alone, torch.Tensor.backward, lambda: clear(alone))):
            samples, carried = [], []
            for _ in range(2 + size["rounds"]):
                samples.append(step_s(layers, seconds, backward, step))
                carried.append(link_bytes(link))
            found[name] = samples[2:]
            if name == "moved":
                found["link"] = {way: (carried[-1][way] - carried[1][way]) / size["rounds"] for way in carried[1]}
    engine.close()
    return found


STEPS_AN_EVENT, WORKERS, SERVERS, HANG_S, MOST_ENDS = 8, 3, 2, 120, 20
ELASTIC = {"strategy": "SHARD_OPTIMIZER", "units": {"classes": ["Counter"]}, "comm": {"timeout_s": 60},
           "optimizer": {"type": "sgd", "lr": 1.0, "momentum": 0.0, "weight_decay": 0.0},
           "sync": {"type": "asynchronous", "owners": "servers", "elastic": True, "max_staleness": 4}}


def role_worker(steps, folder):
    """Runs a worker of the soak. Step n subtracts 1 from number n of each unit. Returns the exit code."""
    import torch

    import tessera

    class Counter(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.count = torch.nn.Parameter(torch.zeros(steps))

    units = torch.nn.ModuleList(Counter() for _ in range(2))
    engine = tessera.Engine(units, ELASTIC)
    with open(folder / "made", "a", buffering=1) as made:
        while (step := engine.take_step(steps)) is not None:
            engine.backward(sum(unit.count[step] for unit in units))
            engine.step()
            made.write(f"{step}\n")
    if engine.writes_results():
        with torch.no_grad():
            values = [(-unit.count).tolist() for unit in units]
        unfinished = folder / "values.unfinished"
        unfinished.write_text(json.dumps(values))
        unfinished.rename(folder / "values")
        engine.note_results_written()
    engine.close()
    return 0


class Soak:
    """Servers and workers of a run, which are killed and come back. Workers are forks of this process, which has imported torch and tessera."""

    def __init__(self, events, seed, folder, binary):
        self.events, self.folder, self.binary = events, folder, binary
        self.steps = STEPS_AN_EVENT * (events + 8)  # the run must not be over before the last event
        self.random = random.Random(seed)
        self.addresses = [f"127.0.0.1:{ranks.free_port()}" for _ in range(SERVERS)]
        os.environ |= {"TESSERA_SERVERS": ",".join(self.addresses), "TESSERA_SERVERS_SECRET": SECRET}
        self.servers, self.workers, self.started = [], [], 0
        self.ends, self.named = [], []  # processes that ended by themselves; workers that failed after a server's kill

    def start_server(self, number):
        with open(self.folder / f"server{number}.log", "a") as log:
            return subprocess.Popen([self.binary, "serve", "--listen", self.addresses[number], "--state",
                                     self.folder / f"state{number}", "--lose", "0"], stdout=subprocess.DEVNULL, stderr=log)

    def start_worker(self):
        self.started += 1
        log = self.folder / f"worker{self.started}.log"
        if pid := os.fork():
            self.workers.append((pid, log))
            return
        code = 1
        try:
            with open(log, "w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = role_worker(self.steps, self.folder)
        except BaseException as error:
            sys.stderr.write(f"{error}\n")
            code = getattr(error, "exit_code", 1)
        sys.stderr.flush()
        os._exit(code)

    def kill_worker(self):
        pid, _ = self.workers.pop(self.random.randrange(len(self.workers)))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if len(self.workers) < WORKERS - 1:
            self.start_worker()

    def kill_server(self):
        number = self.random.randrange(SERVERS)
        self.servers[number].kill()
        self.servers[number].wait()
        self.servers[number] = self.start_server(number)

    def look(self):
        """Notes which workers and servers have failed, and replaces them. Workers end well when the run is over."""
        for worker in list(self.workers):
            pid, log = worker
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            self.workers.remove(worker)
            if code := os.waitstatus_to_exitcode(status):
                said = last_line(log)
                (self.named if code in (69, 75) and "server" in said else self.ends).append(f"worker, {code}: {said}")
                self.start_worker()
        for number, server in enumerate(self.servers):
            if server.poll() is not None:
                self.ends.append(f"server {number}, {server.returncode}: {last_line(self.folder / f'server{number}.log')}")
                self.servers[number] = self.start_server(number)

    def made(self):
        path = self.folder / "made"
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for(self, is_there):
        """Waits until `is_there()` is true. Returns False if no step is made for HANG_S, or if too many processes end
        by themselves."""
        made, since = self.made(), time.monotonic()
        while not is_there():
            if self.made() != made:
                made, since = self.made(), time.monotonic()
            if time.monotonic() - since > HANG_S or len(self.ends + self.named) > max(MOST_ENDS, self.events):
                return False
            self.look()
            time.sleep(0.01)
        return True

    def run(self):
        """Makes the soak, and returns its events and faults."""
        self.servers = [self.start_server(number) for number in range(SERVERS)]
        for _ in range(WORKERS - 1):
            self.start_worker()
        counts = {"kills of workers": 0, "kills of servers": 0, "joins": 0}
        hangs, begun = [], time.monotonic()
        try:
            for event in range(self.events):
                if not self.wait_for(lambda event=event: self.made() >= STEPS_AN_EVENT * event):
                    hangs.append(f"before event {event}")
                    break
                time.sleep(self.random.uniform(0, 0.2))
                what = self.random.choice(["kills of workers", "kills of servers", "joins"])
                if what != "kills of servers" and not 0 < len(self.workers) <= WORKERS:
                    what = "kills of workers" if self.workers else "joins"
                counts[what] += 1
                {"kills of workers": self.kill_worker, "kills of servers": self.kill_server, "joins": self.start_worker}[what]()
            if not hangs and not self.wait_for((self.folder / "values").exists):
                hangs.append("after the last event")
            if not hangs and not self.wait_for(lambda: not self.workers):
                hangs.append("at the end of workers")
        finally:
            for pid, _ in self.workers:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            for server in self.servers:
                server.kill()
                server.wait()
        return {"events": counts, "steps": self.steps, "workers": self.started, "hangs": hangs, "ends": self.ends, "named": self.named,
                "seconds": time.monotonic() - begun} | self.sums()

    def sums(self):
        """Returns {"lost", "again", "unsaid", "wrong"}: the steps of each kind, as the parameters' values show."""
        path = self.folder / "values"
        units = json.loads(path.read_text()) if path.exists() else [[]]
        by_step = list(zip(*units))
        lost = [step for step, counts in enumerate(by_step) if min(counts) < 1] if by_step else ["all: there are no results"]
        said = said_again("\n".join(file.read_text() for file in self.folder.glob("server*.log")))
        return {"lost": lost, "again": [step for step, counts in enumerate(by_step) if max(counts) > 1],
                "unsaid": [step for step, counts in enumerate(by_step) if max(counts) > 1 + said[step]],
                "wrong": [step for step, counts in enumerate(by_step) if any(count != abs(round(count)) for count in counts)]}


def last_line(log):
    return log.read_text(errors="replace").strip().split("\n")[-1]


def said_again(log):
    """Returns {step: how often the servers' log says that it is dealt again}. A worker holds one step at a time."""
    return collections.Counter(map(int, re.findall(r"of its steps unmade, from number (\d+) on; they are dealt again", log)))


def role_soak(events, seed, folder, binary):
    import torch

    import tessera  # noqa: F401

    torch.set_num_threads(1)
    found = Soak(int(events), int(seed), pathlib.Path(folder), binary).run()
    print(json.dumps(found | {"seed": int(seed)}))


ROLES = {"train": role_train, "wire": role_wire, "soak": role_soak}


# These functions make the page.

def table(data):
    """Returns the lines between the marks of the page."""
    lines = ["| what | measured | wanted |", "|---|---:|---|"]
    for name in SECTIONS:
        if found := data["sections"].get(name):
            lines += [f"| {' | '.join(row)} |" for row in ROWS[name](found)]
    of_sections = [f"{name}: {large_batch.how(found | {'small': found['quick']})}" for name in SECTIONS
                   if (found := data["sections"].get(name))]
    return [*lines, "", "Ratios by turns are medians over rounds, with a 95 % interval.", "", *(f"* {line}" for line in of_sections)]


def measured(options, path):
    """Measures the sections that are wanted, and returns them with those that were measured earlier."""
    sections = results.read(path)["sections"] if path.exists() else {}
    about = {"commit": machine.commit(), "machine": machine.facts(), "quick": options.quick}
    for name in options.only:
        say(name)
        found = (soaked(options) if name == "soak" else measured_wire(options) if name == "wire"
                 else compared_by_turns(name, options))
        if found:
            sections = sections | {name: about | found}
            results.write(path, {"schema": results.SCHEMA, "where": "asynchronous_targets", "sections": sections})
    return {"schema": results.SCHEMA, "where": "asynchronous_targets", "sections": sections}


def main():
    if sys.argv[1:2] == ["role"]:
        return ROLES[sys.argv[2]](*sys.argv[3:])
    options = parse_arguments()
    ranks.let_signals_end_ranks()
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        data = measured(options, options.out / RESULTS)
    except ranks.ContenderFailed as failure:
        sys.exit(f"asynchronous_targets.py: {failure}")
    if options.page:
        page = options.out / PAGE
        page.write_text(large_batch.filled(page.read_text(), {"targets": data}, {"targets": table}))
    else:
        print("\n".join(table(data)))
    if faults := faults_of(data["sections"]["soak"]) if "soak" in options.only else []:
        sys.exit("asynchronous_targets.py: soak: " + "; ".join(faults))
    return 0


if __name__ == "__main__":
    sys.exit(main())
