"""Measures on this host, with two ranks of one thread:

    benchmarks/run --quick                          a smoke test of the whole path, with some of the contenders
    benchmarks/run --quick all                      a smoke test with all contenders, under 3 minutes
    benchmarks/run --only gpt_69m_fp32 optimizer    some works and sections
    benchmarks/run --peers torch                    without DeepSpeed, which needs benchmarks/setup
    benchmarks/run --disk /mnt/nvme0                the section "disk" on this disk, not on the disk of this folder
    benchmarks/run --only disk --add replaces the section "disk" of the present results

Each round starts every contender anew, one after the other. Warm-up steps come before the timed steps. A load on the
machine that lasts longer than one contender's run slows all contenders. Before anything is timed, Tessera's strategies
must give the same losses bit for bit, and must have allocated as much memory as they planned. After the first round the
peers must have trained alike, from the same weights on the same samples. If there is a difference, the run ends with
exit code 70. It also ends if a contender fails. Memory is measured in separate runs. The binary is
build/release/app/tessera, or TESSERA_BIN.

Sections of the results:

    steps        [{work, contender, ranks?, rounds_s: [[s]], losses: [[a rank's]], allocated_bytes?, planned_bytes?}]
                 ranks: of "crowded"
    memory       [{work, contender, baseline_bytes, peak_bytes, allocated_bytes?, planned_bytes?}]   means of ranks
    optimizer    [{contender, numel, rounds_s}]        one thread
    optimizer_avx2    [{contender, numel, rounds_s}]   with at most AVX2; also Tessera's, with limit_rounds_s
    collectives  [{contender: "gloo" | "limit", collective, bytes, rounds_s}]   a round: 500 samples, in order of size
    disk         [{contender, kind: "write" | "read" | "mixed", bytes, settings, rounds_s, rounds_cpu_s}]   whole passes
    disk_steps   [{contender, numel, bytes, memory_bytes?, rounds_s, rounds_limit_s?}]   steps with their state on disk
    tessera_bench {section: the output of `tessera bench SECTION` (tessera_bench.py)}
    timeline     [{track, name, start_us, duration_us}] or null
"""

import json
import pathlib
import shutil
import tempfile

import checks
import harness
import machine
import stats
import tessera_bench
import works
from contenders import named
from harness import CHECK_STEPS, FOLDER, say
from launch import Launcher, has_package
from ranks import ContenderFailed
from timeline import last_step_of_trace
from works import REPOSITORY

RANKS = 2
LOSS_TOLERANCES = {"fp32": (1e-5, 1e-2), "bf16": (1e-3, 1e-2)}  # relative tolerances: first step, later steps
# Names for measurements of `tessera bench`: "tessera" means all, and "tessera:optimizer" means one section.
BENCH_SECTIONS = tuple(f"tessera:{section}" for section in tessera_bench.SECTIONS)
SECTIONS = ("python", "optimizer", "collectives", "crowded", "disk", *BENCH_SECTIONS)
ALSO = {"tessera": BENCH_SECTIONS,  # sections that --only adds, since they are compared with the peers' results
        "optimizer": ("tessera:optimizer",), "collectives": ("tessera:collectives",)}
MOST_SAMPLES = 500  # limit for the samples of a collective in a round; short calls are made tens of thousands of times
CROWDED_RANKS = (2, 4, 8)
DISK_CACHE = 96 << 20  # bytes of the cache in a step with a cache: a quarter of the state with bf16 moments
OPTIMIZERS = {"torch": ("fused_fp32", "chain_bf16"), "deepspeed": ("deepspeed_fp32", "deepspeed_chain_bf16")}
# --quick starts only these contenders. The other contenders use the same code of this program.
QUICK = ("torch_alone", "torch_ddp", "torch_fsdp2", "deepspeed_zero3", "tessera_alone", "tessera_no_shard", "tessera_full_shard",
         "tessera_full_shard_private")
QUICK_IN_PYTHON = ("torch_fsdp2", "deepspeed_zero3", "python_full_shard", "python_full_shard_private")
QUICK_CROWDED = ("tessera_full_shard",)
QUICK_MEMORY, QUICK_MEMORY_OF_PYTHON = ("torch_fsdp2", "deepspeed_zero3", "tessera_full_shard"), ("python_full_shard",)
QUICK_WITHOUT = ("step", "memory", "overhead")  # tables that only `tessera bench` makes; tests/app tests them
EXIT_STOPPED = 70


def parsed(parser, words):
    parser.add_argument("--quick", nargs="?", const="some", choices=["some", "all"],
                        help="small models, one round; without \"all\" each section once, with a few contenders")
    harness.add_arguments(parser, "", 3)
    parser.add_argument("--only", nargs="+", metavar="WORK", help=f"works, and the sections tessera, {', '.join(SECTIONS)}")
    parser.add_argument("--add", action="store_true", help="replace what --only names in the results of --out")
    parser.add_argument("--disk", type=pathlib.Path, default=FOLDER, help="directory for the section disk")
    parser.add_argument("--peers", nargs="+", choices=["torch", "deepspeed"], default=["torch", "deepspeed"])
    options = parser.parse_args(words)
    of_host = works.of_host(bool(options.quick))
    names = [work.name for work in of_host]
    also = [name for named_so in options.only or [] for name in ALSO.get(named_so, ())]
    chosen = harness.chosen(parser, options, [*names, "tessera", *SECTIONS], [*names, *SECTIONS])
    options.sections = [name for name in [*names, *SECTIONS] if name in [*chosen, *also]]
    options.works = [work for work in of_host if work.name in options.sections]
    if options.add and (not options.only or options.works):
        parser.error("--add needs --only with sections: works are compared with each other, so they run together")
    options.rounds = harness.rounds_of(parser, options, 3)
    return options


class HostBenchmark(harness.Benchmark):
    def __init__(self, options, folder):
        self.folder = folder
        binary = harness.binary()
        self.python = FOLDER / ".venv/bin/python" if "deepspeed" in options.peers else REPOSITORY / ".venv/bin/python"
        self.families = (*options.peers, "tessera", "python")
        self.launcher = Launcher(binary, dict.fromkeys(self.families, self.python))
        lacks_package = "python" in options.sections and not has_package(self.python, binary)
        sections = [name for name in options.sections if name != "python" or not lacks_package]
        self.works = list(options.works)
        self.works += [works.of_python(bool(options.quick))] * ("python" in sections)
        self.crowd = works.of_crowd(bool(options.quick))
        crowd = [self.crowd] if "crowded" in sections else []
        versions = machine.versions(self.python, ["torch"] + ["deepspeed"] * ("deepspeed" in options.peers))
        some = dict.fromkeys(contender.name for work in [*self.works, *crowd] for contender in self.those(options, work))
        super().__init__(options, options.out / "results.json.xz", sections, [*self.works, *crowd], some, versions, ranks=RANKS)
        self.results |= {"tessera_bench": {}}
        if lacks_package and not (self.earlier and any(work["name"] == "python" for work in self.earlier["works"])):
            self.note("not_run", "python/package", "one Python model", "this build does not have the Python package")

    def those(self, options, work):
        """Returns the contenders of a workload that take part in this run."""
        quick = {"python": QUICK_IN_PYTHON, "crowded": QUICK_CROWDED}.get(work.name, QUICK)
        some = quick if options.quick == "some" else work.contenders
        return [contender for contender in named(work.contenders) if contender.family in self.families and contender.name in some]

    def run(self):
        sections = {"optimizer": self._time_optimizers, "collectives": self._time_collectives, "crowded": self._time_crowded,
                    "disk": self._time_disk}
        for work in self.options.works:
            self._check_strategies(work)
        for number in range(1, self.options.rounds + 1):
            for work in self.works:
                for contender in self.those(self.options, work):
                    self._time(work, contender, RANKS, {}, f"round {number} of {self.options.rounds}, {work.name}")
                if number == 1:
                    self._check_peers(work)
            for name, measure in sections.items():
                if name in self.sections:
                    measure()
                    say(f"round {number} of {self.options.rounds}: {name}")
        for work in self.works:
            for contender in self.those(self.options, work):
                # The Python model is measured only with contenders that shard everything. Other workloads are measured
                # with all contenders.
                if not contender.alone and (work.name != "python" or contender.stage == 3):
                    self._measure_memory(work, contender)
        self._run_tessera_bench()
        if not self.options.add:
            self._take_trace()
        return self.save()

    def _folder(self, work):
        folder = self.folder / work.name
        folder.mkdir(exist_ok=True)
        return folder

    def _check_strategies(self, work):
        losses, planned = {}, {}
        for contender in self.those(self.options, work):
            if contender.family == "tessera" and not contender.alone:
                run = self.launcher.train(contender, work, self._folder(work), RANKS, steps=CHECK_STEPS)
                losses[contender.label], planned[contender.label] = run.losses[0], run.facts
        self.check(work.name, "", lambda: checks.same_losses(losses))
        self.check(work.name, "", lambda: checks.memory_as_planned(planned))

    def _check_peers(self, work):
        losses, ours = {}, {}
        for contender in self.those(self.options, work):
            if contender.family != "tessera" and not contender.alone:
                of_ranks = self.entry("steps", work=work.name, contender=contender.name)["losses"]
                losses[contender.label] = [rank[:CHECK_STEPS] for rank in of_ranks]
                if contender.family == "python":
                    ours[contender.label] = list(zip(*of_ranks, strict=True))  # the losses of all ranks, step by step
        self.check(work.name, "", lambda: checks.peers_train_alike(losses, *LOSS_TOLERANCES[work.dtype]))
        if ours:
            self.check(work.name, "", lambda: checks.same_losses(ours))

    def _time(self, work, contender, count, more, when):
        """Times a contender on a workload. `more`: further fields of the entry's key."""
        run = self.launcher.train(contender, work, self._folder(work), count)
        samples = run.all_samples_s()
        entry = self.add("steps", {"work": work.name, "contender": contender.name} | more, rounds_s=samples)
        entry.setdefault("losses", run.losses)
        entry |= {name: run.facts[name] for name in ("allocated_bytes", "planned_bytes") if name in run.facts}
        say(f"{when}, {contender.label}: {stats.median(samples):.4f} s a step")

    def _time_crowded(self):
        """Times steps with an increasing number of ranks on the same cores."""
        for count in CROWDED_RANKS[:{"some": 1, "all": 2}.get(self.options.quick)]:
            for contender in self.those(self.options, self.crowd):
                self._time(self.crowd, contender, count, {"ranks": count}, f"{count} ranks")

    def _measure_memory(self, work, contender):
        if self.options.quick == "some" and contender.name not in (QUICK_MEMORY_OF_PYTHON if work.name == "python" else QUICK_MEMORY):
            return
        try:
            measured = self.launcher.measure_memory(contender, work, self._folder(work), RANKS)
        except ContenderFailed as failure:  # the timings stay in the results
            say(f"memory, {work.name}, {contender.label}: {failure}")
            return self.note("not_run", f"{work.name}/memory/{contender.name}", f"memory of {contender.label}, {work.title}",
                             str(failure).splitlines()[0])
        self.entry("memory", work=work.name, contender=contender.name).update(measured)
        above = measured["peak_bytes"] - measured["baseline_bytes"]
        say(f"memory, {work.name}, {contender.label}: {above / 2**20:.0f} MiB a rank")

    def _bench(self, section, more=()):
        return tessera_bench.run_section(self.launcher.binary, section, bool(self.options.quick), more)

    def _time_optimizers(self):
        """Times optimizers with the processor's best instructions. Then times them with AVX2, with which Tessera's
        kernels are timed too."""
        self._time_peers_optimizers("optimizer", ())
        if not machine.has_avx2():
            return
        with_avx2 = ("--isa", "avx2")
        self._time_peers_optimizers("optimizer_avx2", with_avx2)
        for case in self._bench("optimizer", with_avx2)["cases"]:
            self.add("optimizer_avx2", {"contender": f"tessera {case['name']}", "numel": case["numel"]},
                     rounds_s=case["samples_s"], limit_rounds_s=[case["limit_s"]])

    def _time_peers_optimizers(self, key, more):
        numel, steps = (1_000_000, 3) if self.options.quick else (32_000_000, 8)
        for family in self.options.peers:
            for name in OPTIMIZERS[family][:1 if self.options.quick == "some" and more else None]:
                line, = self.launcher.peer_lines("optimizer.py", ["--contender", name, "--numel", numel, "--steps", steps, *more],
                                                 self.python)
                self.add(key, {"contender": name, "numel": numel}, rounds_s=line["samples_s"])

    def _time_collectives(self):
        most, seconds = (2**20, {"some": 0.002, "all": 0.02}[self.options.quick]) if self.options.quick else (2**27, 0.3)
        arguments = ["--most-bytes", most, "--seconds", seconds]
        for rank, line in enumerate(self.launcher.peer_lines("gloo_collectives.py", arguments, self.python, RANKS)):
            for case in line["cases"]:
                key = {name: case[name] for name in ("contender", "collective", "bytes")}
                self.add("collectives", key, rounds_s=stats.sample_of(case["samples_s"], MOST_SAMPLES))

    def _time_disk(self):
        """Times passes over a disk, and optimizer steps whose state lies on it. Uses fio only if it is installed."""
        size, numel, rounds = (2**26, 2**25, 1) if self.options.quick else (2**33, 2**26, 3)
        with_deepspeed = "deepspeed" in self.options.peers
        place = ["--dir", self.options.disk, "--rounds", rounds, "--bytes", size, "--numel", numel]
        for name in ["fio"] * bool(shutil.which("fio")) + ["deepspeed_aio", "deepspeed_aio_best"] * with_deepspeed:
            line, = self.launcher.peer_lines("disk.py", [*place, "--contender", name], self.python)
            self._add_passes(name, line["settings"], line)
        if with_deepspeed:
            line, = self.launcher.peer_lines("disk.py", [*place, "--contender", "deepspeed_swapper"], self.python)
            self.add("disk_steps", {"contender": line["peer"]} | {name: line[name] for name in ("numel", "bytes", "memory_bytes")},
                     rounds_s=line["samples_s"])
        written = self._bench("offload", ["--dir", str(self.options.disk), "--size", str(size),
                                          "--cache", str(2**20 if self.options.quick else DISK_CACHE)])
        for name, disk in zip(("tessera", "tessera threads"), written["disks"]):
            self._add_passes(name, disk["engine"], disk)
        for step in written["steps"]:
            self.add("disk_steps", {"contender": f"tessera {step['name']}", "numel": step["numel"], "bytes": step["bytes_moved"],
                                    "memory_bytes": step["memory_bytes"]},
                     rounds_s=step["step_s"], rounds_limit_s=list(map(max, step["in_memory_s"], step["transfer_s"])))

    def _add_passes(self, contender, settings, passes):
        for kind in ("write", "read", "mixed"):
            self.add("disk", {"contender": contender, "kind": kind, "bytes": passes["bytes"]}, rounds_s=passes[kind]["samples_s"],
                     rounds_cpu_s=passes[kind]["cpu_s"]).setdefault("settings", settings)

    def _run_tessera_bench(self):
        wanted = [section for section in tessera_bench.SECTIONS if f"tessera:{section}" in self.sections]
        offered = tessera_bench.offered_sections(self.launcher.binary) if wanted else []
        for section in wanted:
            if section not in offered:
                self.note("not_run", f"tessera:{section}/bench", f"tessera bench {section}", "this build does not have it")
                continue
            if self.options.quick == "some" and section in QUICK_WITHOUT:
                self.note("not_run", f"tessera:{section}/bench", f"tessera bench {section}", "it has no peers: --quick all has it")
                continue
            with_gloo = section == "buckets" and self.options.quick != "some"
            written = tessera_bench.run_buckets(self.launcher.binary, bool(self.options.quick)) if with_gloo else self._bench(section)
            for case in written["cases"] if section == "collectives" else ():
                case["samples_s"] = stats.sample_of(case["samples_s"], MOST_SAMPLES)
            self.results["tessera_bench"][section] = written
            say(f"tessera bench {section}")

    def _take_trace(self):
        """Records a trace of the last steps of a run."""
        self.results["timeline"] = None
        if not self.options.works:
            return self.note("not_run", "timeline/trace", "timeline of a step", "no work was asked for (--only)")
        work, contender = self.options.works[0], *named(["tessera_full_shard"])
        folder = self._folder(work)
        self.launcher.train(contender, work, folder, RANKS, steps=work.warm_up + 1,
                            more=["--trace", folder / "trace.json", "--overwrite"])
        trace = json.loads((folder / "trace.json").read_text())
        self.results["timeline"] = last_step_of_trace(trace)
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "trace.json").write_text(json.dumps(trace))
        say(f"trace of {contender.label}, {work.name}")


def run(options):
    with tempfile.TemporaryDirectory() as folder:
        try:
            written = HostBenchmark(options, pathlib.Path(folder)).run()
        except (checks.CheckFailed, ContenderFailed, tessera_bench.BenchFailed) as failure:
            say(f"stopped: {failure}")
            return EXIT_STOPPED
    from host import page  # this imports matplotlib
    page.write(written, options.out)
    say(f"wrote results.json.xz, tables and index.html to {options.out}")
    return 0
