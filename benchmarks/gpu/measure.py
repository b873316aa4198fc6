"""Measures contenders on one GPU, within a budget of time:

    scripts/gpu_check                       builds, tests, and runs this
    benchmarks/run_gpu                      with an existing build: build/gpu/app/tessera, or TESSERA_BIN
    benchmarks/run_gpu --only optimizer     some sections
    benchmarks/run_gpu --only gpt_7b --add  some sections; the other sections keep their earlier results
    benchmarks/run_gpu --quick --device cpu the whole path without a GPU, as a smoke test

A round runs every task once, the most important first: the GPU's limits, the optimizer's step, then training steps of
each model with each contender. Each task has its own process. Rounds follow until all are done or the time is spent.
Tasks that fail, or do not fit into the GPU's memory or the budget, are listed with their reasons. The program exits
with 1 if something failed, and with 69 without a GPU. It writes <gpu>.json.xz after every task, and <gpu>.md at the
end.

Sections of the results:

    limits       [{limit, amount, unit, rounds_s}]            amount: bytes or operations of a sample
    optimizer    [{contender, numel, bytes, rounds_s, limits_s?}]  limits_s: Tessera's own copies, one median per round
    steps        [{work, contender, rounds_s, losses, device_bytes, allocated_peak_bytes?, allocated_bytes?,
                   planned_bytes?, exposed_s?}]               all except rounds_s are those of the first round
    codecs       [{contender, numel, bytes, rounds_s, limits_s}]   kernels of the codecs of the wire, as in optimizer
    launches     [{contender, rounds_s, over_plain_unit_s}]    steps in which the GPU waits for the host
    tests        [{name, status, seconds, message}]

The key "gpu" has facts about the GPU, or null without one. device_bytes: the GPU's memory in use at the peak, minus the
memory that was in use before the contender started.
"""

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile

import checks
import harness
import machine
import stats
import tessera_bench
import works
from contenders import CONTENDERS, named
from gpu import device, junit, page
from harness import CHECK_STEPS, EXIT_FAILED, EXIT_UNAVAILABLE, say
from launch import Launcher
from memory import PeakSampler
from schedule import Task

ROUNDS, SECONDS = 3, 380
# These are the relative tolerances of the first step, and of the later steps. Attention adds its gradients in any order
# on a GPU, so the last bits of losses differ from run to run.
LOSS_TOLERANCES = (1e-3, 1e-2)
MEMORY_SAMPLE_SECONDS = 0.1  # allocators keep their memory, so a few samples show the peak
SECTIONS = ("limits", "optimizer", "codecs", "launches")
LIMITS_ESTIMATE_S, OPTIMIZER_ESTIMATE_S, CODECS_ESTIMATE_S, LAUNCHES_ESTIMATE_S, LIMIT_S = 12, 10, 5, 12, 60


def parsed(parser, words):
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one round")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: only with --quick")
    harness.add_arguments(parser, "", ROUNDS)
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"that it may take ({SECONDS})")
    parser.add_argument("--only", nargs="+", metavar="NAME", help=f"{', '.join(SECTIONS)}, or a work: "
                        + ", ".join(work.name for work in works.of_gpu(quick=False)))
    parser.add_argument("--first", type=int, metavar="N", help="of each work's contenders, the N most important")
    parser.add_argument("--add", action="store_true", help="to the results that are there, of the same GPU")
    parser.add_argument("--commit", help="what the page calls the commit; default: git's")
    parser.add_argument("--tests", type=pathlib.Path, metavar="FILE", help="JUnit file of ctest -L gpu, for the page")
    parser.add_argument("--failed", nargs=2, action="append", default=[], metavar=("WHAT", "WHY"),
                        help="something that failed before, for the page")
    options = parser.parse_args(words)
    if options.device == "cpu" and not options.quick:
        parser.error("--device cpu is a smoke test: only with --quick")
    options.works = [dataclasses.replace(work, contenders=work.contenders[:options.first]) for work in works.of_gpu(options.quick)]
    options.names = harness.chosen(parser, options, [*SECTIONS, *(work.name for work in options.works)])
    options.rounds = harness.rounds_of(parser, options, ROUNDS)
    return options


def commit(name):
    """Returns the result of machine.commit, unless --commit names a commit. "dirty" is then None, since it is unknown
    whether files have changed since that commit."""
    if name is not None:
        return {"hash": name, "dirty": None}
    try:
        return machine.commit()
    except (OSError, subprocess.CalledProcessError):
        return {"hash": "unknown", "dirty": None}


def memory_meter(gpu):
    """Returns the function that tells how much memory of the GPU is in use. Returns None if there is no such
    function."""
    if gpu is None:
        return None
    try:
        return device.MemoryMeter(gpu["uuid"]).used_bytes
    except (OSError, AttributeError) as error:  # the timings are valid without this check
        say(f"memory of the GPU is not measured: {error}")
        return None


def train(launcher, contender, work, folder, limit_s, used_bytes):
    """Returns the Run. Its facts then have "device_bytes", too. `used_bytes`: the result of memory_meter."""
    sampler, before = PeakSampler(used_bytes, MEMORY_SAMPLE_SECONDS), used_bytes() if used_bytes else 0
    run = launcher.train(contender, work, folder, contender.ranks, limit_s, watch=used_bytes and (lambda pids: sampler))
    run.facts["device_bytes"] = sampler.peak - before if used_bytes else None
    return run


class GpuBenchmark(harness.Benchmark):
    def __init__(self, options, gpu, folder):
        self.folder = folder
        self.gpu = gpu
        binary = harness.binary("build/gpu")
        self.launcher = Launcher(binary, {"torch": sys.executable}, options.device)
        self.used_bytes = memory_meter(gpu)
        name = re.sub(r"[^a-z0-9]+", "-", gpu["name"].lower()).strip("-") if gpu else "cpu"
        contenders = dict.fromkeys(contender for work in options.works for contender in work.contenders)
        super().__init__(options, options.out / f"{name}.json.xz", options.names, options.works, contenders,
                         machine.versions(sys.executable, ["torch"]), options.seconds, commit(options.commit))
        self.results |= {"gpu": gpu, "limits": [], "optimizer": [], "codecs": [], "launches": [],
                         "tests": junit.read(options.tests) if options.tests else []}
        for what, why in options.failed:
            self.note("failed", what, what, why)
        for test in self.results["tests"]:
            if test["status"] != "passed":  # a skipped test counts as failed, since there is a GPU
                self.note("failed", "tests", f"test {test['name']}", test["message"] or test["status"])

    def run(self):
        self.schedule.run(self._tasks(), self.options.rounds, self.save)
        for work in self.options.works:
            self._check(work)
        return self.save()

    def _tasks(self):
        tasks = [Task("limits/gpu", "limits of the GPU", self._limits, LIMITS_ESTIMATE_S, LIMIT_S),
                 Task("optimizer/tessera", "optimizer, Tessera", self._tessera_optimizer, OPTIMIZER_ESTIMATE_S, LIMIT_S),
                 *(Task(f"optimizer/{name}", f"optimizer, PyTorch {name}",
                        lambda limit_s, name=name: self._torch_optimizer(name, limit_s), OPTIMIZER_ESTIMATE_S, LIMIT_S)
                   for name in page.tables.TORCH_OPTIMIZERS),
                 Task("codecs/tessera", "codecs of the wire", self._codecs, CODECS_ESTIMATE_S, LIMIT_S),
                 Task("launches/tessera", "what a unit costs the host", self._launches, LAUNCHES_ESTIMATE_S, LIMIT_S)]
        tasks = [task for task in tasks if task.key.split("/")[0] in self.sections]
        return tasks + [task for work in self.options.works if work.name in self.sections for task in self._step_tasks(work)]

    def _step_tasks(self, work):
        what = f"{work.title}, "
        if self.gpu and self.gpu["memory_bytes"] < work.needs_bytes():
            why = (f"it wants about {work.needs_bytes() / 2**30:.0f} GiB, and the GPU has "
                   f"{self.gpu['memory_bytes'] / 2**30:.0f}")
            for contender in named(work.contenders):
                self.note("not_run", f"{work.name}/{contender.name}", what + contender.label, why)
            return []
        folder = self.folder / work.name
        folder.mkdir()
        return [Task(f"{work.name}/{contender.name}", what + contender.label,
                     lambda limit_s, contender=contender: self._step(work, contender, folder, limit_s), work.estimate_s, work.limit_s)
                for contender in named(work.contenders)]

    def _peer(self, program, arguments, limit_s):
        line, = self.launcher.peer_lines(program, ["--device", self.options.device, *arguments], sys.executable, limit_s=limit_s)
        return line

    def _bench(self, section, limit_s):
        on_gpu = ["--gpu"] if self.options.device == "cuda" else []
        return tessera_bench.run_section(self.launcher.binary, section, self.options.quick, on_gpu, limit_s)

    def _limits(self, limit_s):
        line = self._peer("limits.py", ["--quick"] if self.options.quick else [], limit_s)
        self.results["versions"] |= line["versions"]
        for name, measured in line["limits"].items():
            self.add("limits", {"limit": name, "amount": measured["amount"], "unit": measured["unit"]}, rounds_s=measured["samples_s"])
            say(f"{name}: {measured['amount'] / stats.median(measured['samples_s']) / 1e12:.3f} T{measured['unit']}/s")

    def _tessera_optimizer(self, limit_s):
        self._passes("optimizer", limit_s)

    def _codecs(self, limit_s):
        self._passes("codecs", limit_s)

    def _passes(self, section, limit_s):
        """Adds a section of `tessera bench` whose passes are timed in turn with copies of as many bytes."""
        for case in self._bench(section, limit_s)["cases"]:
            self.add(section, {"contender": case["name"], "numel": case["numel"], "bytes": case["bytes"]},
                     rounds_s=case["samples_s"], limits_s=case["limit_s"])
            say(f"{section}, Tessera {case['name']}: {stats.median(case['samples_s']) * 1e3:.3f} ms")

    def _torch_optimizer(self, name, limit_s):
        numel = 2**20 if self.options.quick else 2**30  # the same number as in `tessera bench optimizer --gpu`
        line = self._peer("optimizer.py", ["--contender", name, "--numel", numel], limit_s)
        self.add("optimizer", {"contender": name, "numel": numel, "bytes": line["bytes"]}, rounds_s=line["samples_s"])
        say(f"optimizer, PyTorch {name}: {stats.median(line['samples_s']) * 1e3:.3f} ms")

    def _launches(self, limit_s):
        written = self._bench("launches", limit_s)
        for row in written["rows"]:
            cells = dict(zip(written["columns"], row))
            entry = self.add("launches", {"contender": cells["contender"]}, rounds_s=[cells["step_s"]])
            over = entry.setdefault("over_plain_unit_s", [])
            if cells["over_plain_unit_s"] is not None:
                over.append(cells["over_plain_unit_s"])
                say(f"a unit of {cells['contender']}: {cells['over_plain_unit_s'] * 1e6:.1f} us of the host's")

    def _step(self, work, contender, folder, limit_s):
        run = train(self.launcher, contender, work, folder, limit_s, self.used_bytes)
        entry = self.add("steps", {"work": work.name, "contender": contender.name}, rounds_s=run.samples_s[0])
        for name, value in ({"losses": run.losses[0]} | run.facts).items():
            entry.setdefault(name, value)
        say(f"{work.title}, {contender.label}: {stats.median(run.samples_s[0]) * 1e3:.2f} ms a step")

    def _check(self, work):
        """Checks that contenders of one family agree in all results that must be equal. A difference is reported as a
        failure, and the timings stay in the results."""
        # Contenders with different rules agree only in the first loss, which comes before an update.
        for kind, who, steps in (("torch", "PyTorch", CHECK_STEPS), ("tessera", "Tessera", CHECK_STEPS),
                                 ("shared", "Tessera, shared GPU", CHECK_STEPS), ("rules", "Tessera's rules", 1)):
            entries = {CONTENDERS[entry["contender"]].label: entry for entry in self.results["steps"]
                       if entry["work"] == work.name and kind_of(CONTENDERS[entry["contender"]]) == kind}
            losses = {label: [entry["losses"][:steps]] for label, entry in entries.items()}
            try:
                if len(losses) > 1:
                    self.check(work.name, f"{who}: ", lambda: checks.peers_train_alike(losses, *LOSS_TOLERANCES))
                if kind != "torch" and entries:
                    self.check(work.name, f"{who}: ", lambda: checks.memory_as_planned(entries))
            except checks.CheckFailed as failure:
                say(str(failure))
                self.note("failed", f"{work.name}/checks", f"check of {who}, {work.title}", str(failure))


def kind_of(contender):
    return contender.group if contender.group in ("shared", "rules") else contender.family


def run(options):
    gpu = None
    if options.device == "cuda":
        os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        os.environ["CUDA_VISIBLE_DEVICES"] = device.chosen()
        try:
            gpu = device.facts(device.chosen())
        except (OSError, subprocess.CalledProcessError) as error:
            say(f"no GPU: {error}. hint: --quick --device cpu tries the path without one")
            return EXIT_UNAVAILABLE
    with tempfile.TemporaryDirectory() as folder:
        benchmark = GpuBenchmark(options, gpu, pathlib.Path(folder))
        written = benchmark.run()
    page.write(written, options.out, benchmark.path.name.removesuffix(".json.xz"))
    own = benchmark.results
    say(f"wrote {benchmark.path} and its .md in {own['runs'][-1]['seconds']:.0f} s; "
        f"{len(own['failed'])} failed, {len(own['not_run'])} not run")
    return EXIT_FAILED if own["failed"] else 0
