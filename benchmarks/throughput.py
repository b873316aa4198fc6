#!/usr/bin/env python3
"""Measures, on the hosts of scripts/net_lab, how throughput grows with the number of hosts and with the batch, as the
authors of BytePS show it.

    benchmarks/throughput.py               1 to 4 hosts at 1 Gbit/s; 1, 4 or 16 samples per rank; 30 minutes per round
    benchmarks/throughput.py --quick       a smoke test of the path, on a tiny model
    benchmarks/throughput.py --redraw      writes the table again; measures nothing

The program writes samples, a table as CSV and a page in Markdown into results/throughput. It needs root, ip and tc
(else exit code 77). A host has one rank of one thread. Each cell is a separate run, and each round measures every cell
once.

"No communication" is a run of as many ranks as there are hosts. They train at the same time, each of them alone. This
run shows how fast the cores of this one machine can be. The throughput without communication grows no further if there
are more ranks than cores. The number to look at is therefore each contender's share of this throughput. The bytes that
the busiest host's link carries in a step, with headers and small messages, are compared with a formula. The exit code
is 1 if these bytes differ from the formula by more than 10 %.

Sections of the results:

    steps      [{work, hosts, contender, rounds: [{round, samples_s, losses, link_bytes: {sent, received} or null}]}]    a work is a batch
    payloads   [{hosts, contender, bytes}]    bytes that a host sends in a step by the formula
"""

import argparse
import dataclasses
import subprocess
import sys

import harness
import machine
import results
import stats
import tables
import works
from contenders import CONTENDERS, named
from harness import EXIT_FAILED, say
from net.lab import LabLauncher, measured_on_hosts
from net.measure import processor, pythons, rates_of
from net.rates import rate_label
from results import Results
from schedule import Task

NAMES = ("torch_alone", "tessera_alone", "torch_ddp", "tessera_no_shard", "torch_fsdp2", "tessera_full_shard")
MOST_HOSTS = 4
WITHIN = 0.10
# Each of N hosts with one rank sends (N - 1) / N times the bytes of the parameters in a step, multiplied by this
# factor. A ring's all-reduce sends as many bytes as an exchange with a gather. Gloo's reduce-scatter is an all-reduce,
# and FSDP2 gathers twice. `tessera plan` computes how many bytes each host sends with other contenders.
FORMULAS = {"torch_ddp": 2, "tessera_no_shard": 2, "torch_fsdp2": 4}
COLUMNS = ("hosts", "batch", "contender", "samples", "median_s", "tokens_per_s", "of_no_communication", "link_bytes", "formula_bytes",
           "over_formula")


def payload(name, hosts, parameters):
    """Returns the bytes that a host sends in a step according to the formula. Returns None if there is no formula."""
    return FORMULAS[name] * (hosts - 1) / hosts * 4 * parameters if name in FORMULAS else None


def parsed(words):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tiny model, two hosts, one batch, one round")
    harness.add_arguments(parser, "throughput", 1)
    parser.add_argument("--hosts", type=int, nargs="+", choices=range(1, MOST_HOSTS + 1), metavar="N", help="1 2 3 4 (quick: 1 2)")
    parser.add_argument("--batches", type=int, nargs="+", metavar="B", help="samples of a rank and step: 1 4 16 (quick: 2)")
    parser.add_argument("--rate", default="1gbit", help="of a link, as tc writes it, or unlimited")
    parser.add_argument("--steps", type=int, help="timed steps of a run (3; quick: 2)")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", help=", ".join(NAMES))
    parser.add_argument("--redraw", action="store_true", help="measures nothing")
    options = parser.parse_args(words)
    options.names = harness.chosen(parser, options, NAMES)
    options.hosts = sorted(set(options.hosts or ([1, 2] if options.quick else [1, 2, 3, 4])))
    options.batches = sorted(set(options.batches or ([2] if options.quick else [1, 4, 16])))
    options.steps = options.steps if options.steps is not None else 2 if options.quick else 3
    options.rounds = harness.rounds_of(parser, options, 1)
    options.add, options.where = False, "throughput"
    if options.steps < 1 or options.batches[0] < 1:
        parser.error("--steps and --batches must be 1 or more")
    try:
        if len(rates_of(options.rate)) != 1:
            parser.error(f"--rate wants one rate, got {options.rate}")
    except argparse.ArgumentTypeError as wrong:
        parser.error(f"--rate {wrong}")
    return options


def work_of(options, batch):
    work = works.of_net(options.quick, options.steps)
    return dataclasses.replace(work, name=f"{work.name}_batch_{batch}", warm_up=1, batch=batch, contenders=tuple(options.names))


class Throughput(harness.Benchmark):
    def __init__(self, options, binary):
        self.interpreters = pythons(binary)
        self.works = [work_of(options, batch) for batch in options.batches]
        versions = {"tessera": subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=60).stdout.split()[-1]}
        versions |= machine.versions(self.interpreters["torch"], ["torch"])
        options.out.mkdir(parents=True, exist_ok=True)
        super().__init__(options, options.out / "results.json.xz", [work.name for work in self.works], self.works, options.names, versions,
                         hosts=options.hosts, rate=options.rate, processor=processor(binary))
        self.binary = binary
        self.results["payloads"] = []

    def run(self):
        for number in range(1, self.options.rounds + 1):
            self.schedule.run_round([self._task(hosts, work, contender, number) for work in self.works for hosts in self.options.hosts
                                     for contender in named(self.options.names) if hosts > 1 or contender.alone], number)
            written = self.save()
        return written

    def _task(self, hosts, work, contender, number):
        of_hosts = f"{hosts} host{'s' * (hosts > 1)}"
        return Task(f"{work.name}/{hosts}/{contender.name}", f"{contender.label}, {of_hosts}, batch {work.batch}",
                    lambda _: self._time(hosts, work, contender, number))

    def _time(self, hosts, work, contender, number):
        launcher = LabLauncher(self.binary, self.interpreters, work, hosts, 1)
        measured = launcher.measure(contender, self.options.rate, side_by_side=hosts)
        self.add("steps", {"work": work.name, "hosts": hosts, "contender": contender.name}, rounds={"round": number} | measured)
        if not contender.alone:
            known = self.entry("payloads", hosts=hosts, contender=contender.name)
            if "bytes" not in known:
                by_hand = payload(contender.name, hosts, work.parameters())
                known["bytes"] = by_hand if by_hand is not None else launcher.planned_bytes(contender)
        say(f"{contender.label}, {hosts} x {work.batch}: {stats.median(measured['samples_s']):.3f} s a step")


class ThroughputResults(Results):
    """A run's results as numbers. A sample is the median of the timed steps of one run of a contender. There is one
    sample for each round."""

    def __init__(self, data):
        super().__init__(data)
        self.hosts = data["runs"][-1]["hosts"]

    def seconds(self, work, hosts, name):
        rounds = (self.entry("steps", work=work["name"], hosts=hosts, contender=name) or {"rounds": []})["rounds"]
        return [stats.median(run["samples_s"]) for run in rounds]

    def row(self, work, hosts, name):
        """Returns a line of throughput.csv as {column: value}. Returns None if the contender has no sample."""
        samples = self.seconds(work, hosts, name)
        if not samples:
            return None
        seconds = stats.median(samples)
        alone = self.seconds(work, hosts, "tessera_alone" if CONTENDERS[name].family == "tessera" else "torch_alone")
        link, formula = self._link_bytes(work, hosts, name), self._formula(hosts, name)
        return dict(zip(COLUMNS, (
            hosts, work["batch"], self.label(name), len(samples), seconds, hosts * work["batch"] * work["model"]["seq_len"] / seconds,
            stats.median(alone) / seconds if alone else None, link, formula, link / formula if link and formula else None), strict=True))

    def _link_bytes(self, work, hosts, name):
        rounds = (self.entry("steps", work=work["name"], hosts=hosts, contender=name) or {"rounds": []})["rounds"]
        found = [max(run["link_bytes"].values()) for run in rounds if run["link_bytes"]]
        return stats.median(found) if found else None

    def _formula(self, hosts, name):
        return (self.entry("payloads", hosts=hosts, contender=name) or {}).get("bytes")

    def rows(self):
        return [row for work in self.works.values() for hosts in self.hosts for name in self.contenders if (row := self.row(work, hosts, name))]

    def far_off(self):
        """Returns the rows in which the bytes of the link differ from the formula by more than WITHIN."""
        return [row for row in self.rows() if row["over_formula"] is not None and abs(row["over_formula"] - 1) > WITHIN]


def page_of(found):
    """Returns the tables as Markdown."""
    data, hosts = found.data, found.hosts
    run, work = data["runs"][-1], data["works"][0]
    changed = ", with changes" if run["commit"]["dirty"] else ""
    heads = "".join(f" {count} host{'s' * (count > 1)} |" for count in hosts)

    def line(name, of, cell):
        cells = [found.row(of, count, name) for count in hosts]
        return f"| {found.label(name)} | {of['batch']} |" + "".join(f" {cell(row) if row else ''} |" for row in cells)

    def speed(row):
        share = row["of_no_communication"]
        return f"{row['tokens_per_s']:,.0f}" + (f" ({share:.2f})" if share is not None else "")

    def sent(row):
        return "" if row["over_formula"] is None else f"{row['link_bytes'] / 1e6:.1f} ({row['over_formula']:.2f})"

    names = list(found.contenders)
    return "\n".join([
        "# Throughput against batch and hosts", "",
        f"{work['title']}, {rate_label(run['rate'])}, {run['rounds']} round{'s' * (run['rounds'] > 1)} of {work['steps']} timed steps, "
        f"commit {run['commit']['hash'][:7]}{changed}, {run['processor']}. `{run['command']}`", "",
        "Tokens a second of all hosts together, and in brackets the share of that without communication, of as many ranks side by side:", "",
        f"| who | samples a rank |{heads}", "|---|---:|" + "---:|" * len(hosts),
        *[line(name, of, speed) for name in names for of in found.works.values()], "",
        "MB that the busiest host's link carries in a step, and in brackets over what the formula says:", "",
        f"| who | samples a rank |{heads}", "|---|---:|" + "---:|" * len(hosts),
        *[line(name, of, sent) for name in names for of in found.works.values() if not found.is_alone(name)], ""])


def write(data, folder):
    """Writes the table and the page. Returns whether the bytes of each payload agree with its formula."""
    found = ThroughputResults(data)
    tables.write_csv({"throughput": {"title": "Throughput", "columns": list(COLUMNS), "rows": [list(row.values()) for row in found.rows()]}},
                     folder)
    (folder / "throughput.md").write_text(page_of(found))
    for row in found.far_off():
        say(f"{row['contender']}, {row['hosts']} hosts, batch {row['batch']}: the link carries {row['over_formula']:.2f} of the formula's bytes")
    return not found.far_off()


def main():
    options = parsed(sys.argv[1:])
    if options.redraw:
        return 0 if write(results.read(options.out / "results.json.xz"), options.out) else EXIT_FAILED
    binary = harness.binary()
    shapes = [(hosts, options.rate) for hosts in options.hosts if hosts > 1]
    code, data = measured_on_hosts(shapes, lambda: Throughput(options, binary).run())
    if code != 0:
        return code
    is_right = write(data, options.out)
    say(f"wrote samples, table and page to {options.out}, {len(data['failed'])} runs failed")
    return 0 if is_right and not data["failed"] else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
