"""Measures training over a network, between hosts that are made on this machine (this needs root, ip and tc):

    benchmarks/run_net                              2 hosts of one rank, five rates, all contenders in three rounds
    benchmarks/run_net --quick                      a smoke test of the whole path, under 90 s
    benchmarks/run_net --ranks-per-host 2           with ranks that share a host; adds HYBRID_SHARD
    benchmarks/run_net --rates 1gbit --only torch_ddp tessera_no_shard

scripts/net_lab makes the hosts and their links. Tessera and its peers treat ranks of two hosts as ranks of two
machines. Each round starts every contender again, one after the other, on hosts made for this contender. Warm-up steps
come before the timed steps. Each round begins with another contender. A task that fails or does not end in time is
listed with its reason, and the other tasks still run. A contender that failed twice at a rate is not tried there again.
Results are written after every round. The binary is build/release/app/tessera, or TESSERA_BIN.

The exit code is 1 if something failed, 69 without the binary, and 77 if this machine cannot make hosts.

Sections of the results:

    wire         [{rate, round, one_way, both_ways}]         bytes per second, by wire.py
    steps        [{work, rate, contender, rounds: [{round, samples_s, losses, link_bytes: {sent, received} or null}]}]
    predicted    [{rate, contender, round, seconds}]         of a step, by `tessera plan`; with --predict

and for the whole run: hosts, ranks_per_host, rates (as tc writes them, or "unlimited"), processor.
"""

import argparse
import functools
import json
import subprocess

import harness
import machine
import stats
import works
from contenders import named, those_of
from harness import EXIT_FAILED, FOLDER, say
from launch import has_package
from net.lab import Failed, LabLauncher, measured_on_hosts, wire_speed
from net.rates import bits_per_s, rate_label
from schedule import Task

RATES, QUICK_RATES = "unlimited,10gbit,2gbit,1gbit,200mbit", "unlimited,200mbit"
MOST_FAILURES = 2
# These contenders are enough for a smoke test of every path.
QUICK = ("torch_alone", "tessera_alone", "torch_ddp", "tessera_no_shard", "torch_fsdp2", "tessera_full_shard",
         "python_full_shard", "torch_ddp_power_sgd", "tessera_int8", "tessera_power_sgd")


def rates_of(text):
    rates = text.split(",")
    try:
        known = {bits_per_s(rate) for rate in rates}
    except AttributeError:
        raise argparse.ArgumentTypeError(f"wants rates such as 2gbit,200mbit,unlimited, got {text}") from None
    if len(known) < len(rates):
        raise argparse.ArgumentTypeError(f"names a rate twice: {text}")
    return rates


def parsed(parser, words):
    parser.add_argument("--quick", action="store_true", help="a tiny model, two rates, one round, fewer contenders")
    harness.add_arguments(parser, "net", 3)
    parser.add_argument("--hosts", type=int, choices=[2, 3], default=2)
    parser.add_argument("--ranks-per-host", type=int, choices=[1, 2], default=1)
    parser.add_argument("--rates", type=rates_of, help=f"as tc writes them ({RATES}; quick: {QUICK_RATES})")
    parser.add_argument("--steps", type=int, help="timed steps of a run (6; quick: 3)")
    parser.add_argument("--predict", action="store_true",
                        help="also what `tessera plan` predicts of Tessera's steps, from links and profiles of each round")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help=", ".join(those_of("net")))
    options = parser.parse_args(words)
    options.names = harness.chosen(parser, options, those_of("net"), QUICK if options.quick else None)
    options.rates = options.rates or rates_of(QUICK_RATES if options.quick else RATES)
    options.rounds = harness.rounds_of(parser, options, 3)
    options.steps = options.steps if options.steps is not None else 3 if options.quick else 6
    options.add = False
    if options.steps < 1:
        parser.error("--steps must be 1 or more")
    return options


def processor(binary):
    """Returns the processor's name, its number of cores, and its instruction sets according to `tessera doctor`."""
    done = subprocess.run([binary, "doctor"], capture_output=True, text=True, timeout=60)
    said = [" ".join(line.split()[3:]) for line in done.stdout.splitlines() if line.startswith("instruction set")]
    return ", ".join([machine.cpu_model(), f"{machine.facts()['cores']} cores", *said])


def pythons(binary):
    """Returns {family: interpreter}. DeepSpeed is in the environment that benchmarks/setup has made."""
    found = {"torch": harness.REPOSITORY / ".venv/bin/python"}
    if has_package(found["torch"], binary):
        found["python"] = found["torch"]
    other = FOLDER / ".venv/bin/python"
    if other.exists() and subprocess.run([other, "-c", "import deepspeed"], capture_output=True).returncode == 0:
        found["deepspeed"] = other
    return found


class NetBenchmark(harness.Benchmark):
    def __init__(self, options, binary):
        interpreters = pythons(binary)
        work = works.of_net(options.quick, options.steps)
        self.launcher = LabLauncher(binary, interpreters, work, options.hosts, options.ranks_per_host)
        self.contenders, missing = [], []
        for contender in named(options.names):
            if contender.family != "tessera" and contender.family not in interpreters:
                missing.append((contender, "not built" if contender.family == "python" else "not installed (benchmarks/setup)"))
            elif contender.ranks_per_host > options.ranks_per_host:
                missing.append((contender, f"needs {contender.ranks_per_host} ranks a host"))
            else:
                self.contenders.append(contender)
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60).stdout
        versions = {"tessera": said.split()[-1]} | machine.versions(interpreters["torch"], ["torch"])
        if "deepspeed" in interpreters:
            versions |= machine.versions(interpreters["deepspeed"], ["deepspeed"])
        super().__init__(options, options.out / "results.json.xz", [work.name], [work], [each.name for each in self.contenders],
                         versions, hosts=options.hosts, ranks_per_host=options.ranks_per_host, rates=options.rates,
                         processor=processor(binary))
        self.schedule.most_failures = MOST_FAILURES
        self.results |= {"wire": [], "predicted": []}
        for contender, why in missing:
            self.note("not_run", f"{work.name}/{contender.name}", contender.label, why)

    def run(self):
        for rate in self.options.rates:
            for number in range(1, self.options.rounds + 1):
                self.schedule.run_round(self._tasks(rate, number), number)
                written = self.save()
        return written

    def _tasks(self, rate, number):
        def task(name, what, run):
            return Task(f"{rate}/{name}", f"{what} at {rate_label(rate)}", lambda _: run(rate, number))

        shift = (number - 1) % max(len(self.contenders), 1)
        return [task("wire", "the wire", self._measure_wire),
                *(task(each.name, each.label, functools.partial(self._time, each))
                  for each in self.contenders[shift:] + self.contenders[:shift]),
                *[task("predicted", "links", self._predict)] * self.options.predict]

    def _measure_wire(self, rate, number):
        speed = wire_speed(self.options.hosts, rate, 0.5 if self.options.quick else 2)
        self.results["wire"].append({"rate": rate, "round": number} | speed)
        say(f"{rate}, round {number}: a connection carries {speed['both_ways'] / 1e6:.0f} MB/s each way")

    def _time(self, contender, rate, number):
        measured = self.launcher.measure(contender, rate)
        self.add("steps", {"work": self.launcher.work.name, "rate": rate, "contender": contender.name},
                 rounds={"round": number} | measured)
        say(f"{rate}, round {number} of {self.options.rounds}, {contender.label}: {stats.median(measured['samples_s']):.4f} s a step")

    def _predict(self, rate, number):
        """Predicts steps. Contenders that have the same units share a profile."""
        links = self.launcher.links(rate)
        profiles = {}
        for contender in filter(lambda each: each.predicted, self.contenders):
            units = json.dumps([contender.more.get(key) for key in ("units", "optimizer")])
            try:
                profiles[units] = profiles.get(units) or self.launcher.profile(contender)
                seconds = self.launcher.predicted(contender, links, profiles[units])
            except Failed as failure:
                self.schedule.note_failure(f"{rate}/predicted/{contender.name}",
                                           f"prediction of {contender.label} at {rate_label(rate)}", str(failure))
            else:
                self.results["predicted"].append({"rate": rate, "contender": contender.name, "round": number, "seconds": seconds})


def run(options):
    binary = harness.binary()
    shapes = [(options.hosts, rate) for rate in options.rates]
    code, results = measured_on_hosts(shapes, lambda: NetBenchmark(options, binary).run())
    if code != 0:
        return code
    from net import page  # this imports matplotlib
    page.write(results, options.out)
    say(f"wrote results.json.xz, net.csv and index.html to {options.out}, {len(results['failed'])} runs failed")
    return EXIT_FAILED if results["failed"] else 0
