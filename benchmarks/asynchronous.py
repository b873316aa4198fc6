#!/usr/bin/env python3
"""Studies when ranks should wait for each other: nine ways to train on four replicas, under three clocks.

    benchmarks/asynchronous.py --runs FOLDER --page            trains what FOLDER has no results of, writes results/asynchronous.json.xz,
                                                               and fills results/asynchronous.md and its pictures
    benchmarks/asynchronous.py --runs FOLDER --page --small    a small form of the study: about 15 minutes on two cores
    benchmarks/asynchronous.py --runs FOLDER --quick           some steps of each way under one clock, as a smoke test
    benchmarks/asynchronous.py --page                          fills the page with what the results have

Without --page the tables are printed.

Runs that FOLDER has are not made again, so a study that was stopped continues. All runs of a folder have one form:
whole, small or quick.

There are two studies. `digits` is a perceptron on the digits of this Python's scikit-learn, or on those of --digits
FILE, which examples/images/digits.py writes. `text` is a small GPT on LibTorch's headers. Each study has four ranks of
one thread. Each rank trains a model, and most of its computing time is a sleep.

How a way is measured depends on what decides its losses:

* `played`: an order of pushes and pulls decides. push_orders.py makes such an order for the clock, and ranks
  follow it (sync.play_order), faster than the clock. Seconds are those of the simulation.
* `met`: nothing but the data decides, so one run serves for all clocks. Seconds are those of the simulation.
* `lived`: the order in which ranks arrive decides. This order cannot be played, so ranks keep the clock. Seconds are
  measured.

Nine runs of the digits (FORECAST under each clock) keep the clock too, and are compared with the simulation's
prediction.
"""

import argparse
import functools
import importlib.util
import json
import math
import pathlib
import statistics
import sys
import typing

import harness
import large_batch
import machine
import push_orders
import ranks
import results
from demo_text import make_data
from harness import FOLDER
from large_batch import loss, percent, spread
from launch import built_package
from push_orders import Clock, Costs

STUDIES = ("digits", "text")
RANKS, BATCH, BUCKETS = 4, 8, 20
LOSS_AT = 0.9                  # the other ways are to reach the synchronous run's loss at this share of its steps
TUNING_SEED = 0
CALIBRATION_STEPS = 24
FACTORS = (1, 0.5, 0.25)       # factors of the synchronous run's learning rate: the other ways choose among these rates


class Way(typing.NamedTuple):
    label: str
    kind: str                  # "played", "met" or "lived"
    sync: dict
    rate_of: str               # the way whose rate this way has; its own name if it chooses its rate
    at_a_death: str


_CHECKPOINT = "the job ends; what came after the last checkpoint is lost"
_OWNED = f"owners ranks: {_CHECKPOINT}. Owners servers: the step of the rank that died, which is dealt again with `elastic`"
WAYS = {
    "synchronous": Way("synchronous", "met", {}, "synchronous", _CHECKPOINT),
    "backups": Way("backups, 1", "lived", {"type": "backups", "count": 1}, "synchronous", _CHECKPOINT),
    "max_staleness": Way("asynchronous, max_staleness 4", "played", {"type": "asynchronous", "max_staleness": 4}, "asynchronous", _OWNED),
    "asynchronous": Way("asynchronous", "played", {"type": "asynchronous"}, "asynchronous", _OWNED),
    "inverse": Way("asynchronous, scale inverse", "played", {"type": "asynchronous", "scale": "inverse"}, "inverse", _OWNED),
    "compensated": Way("asynchronous, delay_compensation", "played",
                       {"type": "asynchronous", "delay_compensation": {"lambda": 1.0, "adaptive": True}}, "asynchronous", _OWNED),
    "hogwild": Way("Hogwild", "lived", {"type": "hogwild"}, "asynchronous", _CHECKPOINT),
    "local_sgd": Way("local SGD, every 8 steps", "met", {"type": "local_sgd", "every": 8}, "local_sgd", _CHECKPOINT),
    "diloco": Way("DiLoCo, every 8 steps", "met", {"type": "diloco", "every": 8, "outer": {"lr": 0.7, "momentum": 0.5}}, "diloco",
                  _CHECKPOINT),
}
FORECAST = ("synchronous", "asynchronous", "max_staleness")
CLOCKS = {"alike": "all ranks alike", "slow": "one rank at half speed", "stalls": "each rank stalls for 1 s in 2 % of its steps"}
OPTIMIZERS = {"digits": ({"type": "sgd", "momentum": 0.9, "weight_decay": 0.0}, [0.03, 0.1, 0.3]),
              "text": ({"type": "adamw", "betas": [0.9, 0.95], "weight_decay": 0.01}, [1e-3, 3e-3, 1e-2])}
WHOLE = {"seeds": [1, 2, 3], "steps": {"digits": 544, "text": 400}, "step_s": {"digits": 0.05, "text": 0.1}, "stall_s": 1.0,
         "factors": FACTORS, "clocks": list(CLOCKS)}
SMALL = WHOLE | {"steps": {"digits": 160, "text": 80}}
QUICK = WHOLE | {"seeds": [1], "steps": {"digits": 16, "text": 16}, "step_s": {"digits": 0.02, "text": 0.04}, "stall_s": 0.1,
                 "factors": FACTORS[-1:], "clocks": ["slow"]}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, metavar="FOLDER", help="for what runs gave, a line each")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--small", action="store_true", help="fewer steps and seeds")
    form.add_argument("--quick", action="store_true", help="16 steps, one seed and one clock; losses must be finite")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--digits", type=pathlib.Path, metavar="FILE", help="what examples/images/digits.py writes")
    parser.add_argument("--page", action="store_true", help="fills the tables of asynchronous.md in --out, and draws")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results", metavar="FOLDER", help="of asynchronous.json.xz")
    options = parser.parse_args()
    if not options.runs and not options.page:
        parser.error("--runs, --page or both are wanted")
    if options.page and importlib.util.find_spec("matplotlib") is None:
        sys.stderr.write("asynchronous.py: this Python has no matplotlib, which draws. hint: scripts/setup --tests, or leave --page out\n")
        sys.exit(harness.EXIT_UNAVAILABLE)
    options.size = QUICK if options.quick else SMALL if options.small else WHOLE
    return options


# These functions define the runs: their strategies, and the times of their steps.

def clock_of(size, study, name):
    slowness = (1.0,) * (RANKS - 1) + (2.0 if name == "slow" else 1.0,)
    stalls = (0.02, size["stall_s"]) if name == "stalls" else (0.0, 0.0)
    return Clock(size["step_s"][study], slowness, *stalls)


def timeline_of(way, clock, costs, steps, seed):
    """Returns the Timeline of a way. It has as many gradients as `steps` synchronous steps have. The way `backups`
    drops some of them."""
    sync = WAYS[way].sync
    if way == "backups":
        return push_orders.backups(clock, costs, steps, seed, sync["count"])
    if WAYS[way].kind == "met":
        return push_orders.meeting(clock, costs, steps, seed, sync.get("every", 1))
    costs = costs._replace(pull_s=0.0) if way == "hogwild" else costs
    return push_orders.asynchronous(clock, costs, steps * RANKS, seed, sync.get("max_staleness"))


def strategy(study, way, rate):
    """Returns the strategy of a run, without the order that the run may play."""
    made = {"strategy": "SHARD_OPTIMIZER", "gradient_clipping": 1.0, "optimizer": OPTIMIZERS[study][0] | {"lr": rate}}
    if study == "text":
        made |= {"units": {"classes": ["Block"]}}
    sync = WAYS[way].sync
    if WAYS[way].kind == "met" and sync:
        made |= {"strategy": "NO_SHARD", "mesh": {"replicate": RANKS, "shard": 1}}
    return made | ({"sync": sync} if sync else {})


def with_order(made, key, path):
    return made | {"sync": made["sync"] | {key: str(path)}}


def run_of(study, way, rate, seed, timeline, name):
    """Returns a run whose ranks do not sleep: its "clock" is None. The caller sets "clock" if ranks keep one."""
    tickets = None if way == "backups" else timeline.tickets(RANKS)
    return {"name": name, "way": way, "seed": seed, "batch": BATCH, "strategy": strategy(study, way, rate), "clock": None, "tickets": tickets,
            "steps": 1 + max(step.ticket for step in timeline.steps) // RANKS, "expected_s": timeline.seconds()}


def forecast_of(way, timeline):
    """Returns the simulation's prediction for a run. Gradients that are summed have no age."""
    has_ages = WAYS[way].kind != "met" and way != "backups"
    return {"expected_s": timeline.seconds(), "expected_staleness": statistics.fmean(timeline.ages()) if has_ages else None}


# These functions compute losses and seconds from the results of runs.

def curve(moments):
    """Returns {"losses", "ends"}. `moments`: [(seconds, loss)] of the gradients. They are sorted by their seconds and
    cut into BUCKETS equal parts. Each part has its mean loss, and the seconds at its end."""
    moments = sorted(moments)
    cuts = [round(len(moments) * part / BUCKETS) for part in range(BUCKETS + 1)]
    parts = [moments[first:last] for first, last in zip(cuts, cuts[1:])]
    return {"losses": [float(f"{statistics.fmean(each for _, each in part):.5g}") for part in parts],
            "ends": [float(f"{part[-1][0]:.5g}") for part in parts]}


def moments_of(found, timeline=None):
    """Returns [(seconds, loss)] of all gradients of a run. The seconds come from `timeline`, or are measured if
    `timeline` is None."""
    if timeline is None:
        return [each for of in found["ranks"] for each in zip(of["ends"], of["losses"])]
    by_ticket = {ticket: each for of in found["ranks"] for ticket, each in zip(of["tickets"], of["losses"])}
    return [(step.pushed, by_ticket[step.ticket]) for step in timeline.steps]


def final_loss(found):
    """Returns the mean training loss of the last tenth of the samples."""
    by_ticket = sorted(each for of in found["ranks"] for each in zip(of["tickets"], of["losses"]))
    return statistics.fmean(each for _, each in by_ticket[-max(1, len(by_ticket) // 10):])


def seconds_to(of_run, wanted):
    """Returns the seconds at which a curve reaches the loss `wanted`, interpolated between two of its points. Returns
    None if it never does."""
    last = None
    for now in zip(of_run["ends"], of_run["losses"]):
        if not math.isfinite(now[1]):
            return None
        if now[1] <= wanted:
            if last is None:
                return now[0]
            return last[0] + (now[0] - last[0]) * (last[1] - wanted) / (last[1] - now[1])
        last = now
    return None


def wanted_loss(rows):
    """Returns the mean over seeds of the loss that the synchronous run has at LOSS_AT of its steps."""
    row = next(row for row in rows if row["way"] == "synchronous")
    return statistics.fmean(of_run["curve"]["losses"][round(LOSS_AT * BUCKETS) - 1] for of_run in row["runs"])


class Runs:
    """Results of runs of a study, by their names; each is a line of FOLDER/STUDY.jsonl."""

    def __init__(self, options, study):
        self.options, self.study, self.size = options, study, options.size
        self.folder = options.runs
        self.folder.mkdir(parents=True, exist_ok=True)
        form = self.folder / "form.json"
        size = json.loads(json.dumps(self.size))
        if form.exists() and json.loads(form.read_text()) != size:
            sys.exit(f"asynchronous.py: {self.folder} has runs of another form. hint: give another folder, or --small or --quick as before")
        form.write_text(json.dumps(size))
        self.path = self.folder / f"{study}.jsonl"
        self.binary = harness.binary()
        self.known = self._read()

    def _read(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        found = {}
        for line in lines:
            try:
                found |= {(run := json.loads(line))["name"]: run}
            except ValueError:
                pass  # the run was stopped while it wrote the line
        return found

    def steps(self):
        return self.size["steps"][self.study]

    @functools.cached_property
    def data(self):
        """Returns the path of the JSON file that asynchronous_ranks.py takes as DATA."""
        about = self.folder / f"{self.study}_data.json"
        if self.study == "text":
            training, held_out = make_data(self.folder)
        else:
            training = held_out = large_batch.digits_file(self.options)
        about.write_text(json.dumps({"study": self.study, "training": str(training), "held_out": str(held_out)}))
        return about

    def trained(self, wanted):
        """Trains those of the `wanted` runs that have no result yet, and returns the results of all `wanted` runs."""
        left = [run for run in wanted if run["name"] not in self.known]
        if left:
            print(f"asynchronous.py: {self.study}: {len(left)} runs, the first is {left[0]['name']}", flush=True)
            text = self.path.read_text() if self.path.exists() else ""
            if text and not text.endswith("\n"):  # a line that was not written to its end
                self.path.write_text(text + "\n")
            plan = self.folder / f"{self.study}_runs.json"
            plan.write_text(json.dumps(left))
            limit_s = 900 + 3 * sum(run["expected_s"] for run in left)
            environments = [each | built_package(self.binary) for each in ranks.rank_environments(RANKS)]
            try:
                ranks.run_ranks([sys.executable, FOLDER / "asynchronous_ranks.py", self.data, plan, self.path], environments, limit_s)
            except ranks.ContenderFailed as failure:
                sys.exit(f"asynchronous.py: {failure}\nhint: the same command goes on behind the last run that ended")
            self.known = self._read()
        return [self.known[run["name"]] for run in wanted]


class Study:
    """Makes a study."""

    def __init__(self, runs):
        self.runs, self.study, self.size = runs, runs.study, runs.size
        self.templates, self.costs = self._calibrated()
        self.rates = {}

    def clock(self, name):
        return clock_of(self.size, self.study, name)

    def _calibrated(self):
        """Returns the templates of a step and the Costs, from two short runs that keep the clock."""
        recorded = self.runs.folder / f"{self.study}_recorded.jsonl"
        clock, wanted = self.clock("alike"), []
        for way in ("asynchronous", "synchronous"):
            timeline = timeline_of(way, clock, Costs(), CALIBRATION_STEPS, TUNING_SEED)
            run = run_of(self.study, way, OPTIMIZERS[self.study][1][0] / RANKS, TUNING_SEED, timeline, f"calibration {way}")
            wanted.append(run | {"clock": clock})
        wanted[0]["strategy"] = with_order(wanted[0]["strategy"], "record_order", recorded)
        pushed, met = self.runs.trained(wanted)
        return push_orders.templates_of(recorded.read_text(), RANKS), Costs(pushed["pull_s"], pushed["push_s"], met["meet_s"])

    def timeline(self, way, clock, seed):
        return timeline_of(way, self.clock(clock), self.costs, self.runs.steps(), seed)

    def run(self, way, clock, rate, seed):
        """Returns the run from which a way's losses come. It is the same for all clocks if only the data
        decides the losses."""
        kind = WAYS[way].kind
        timeline = self.timeline(way, clock, seed)
        run = run_of(self.study, way, rate, seed, timeline, f"{way} {'any' if kind == 'met' else clock} {rate:g} {seed}")
        if kind == "lived":
            run["clock"] = self.clock(clock)
        if kind == "played":
            bound = WAYS[way].sync.get("max_staleness")
            path = self.runs.folder / f"{self.study}_order_{clock}_{bound}_{seed}.jsonl"
            if not path.exists() and run["name"] not in self.runs.known:
                unfinished = path.with_suffix(".unfinished")
                push_orders.write_order(unfinished, timeline, self.templates)
                unfinished.rename(path)
            run["strategy"] = with_order(run["strategy"], "play_order", path)
        return run

    def tune(self):
        """Chooses the rates, by the training loss under the clock of equal ranks, with a seed that the study does not
        use."""
        def best(rates_of):
            """Returns {way: the best of its rates}. A way with only one rate is not trained."""
            wanted = {way: [self.run(way, "alike", rate, TUNING_SEED) for rate in rates] for way, rates in rates_of.items() if len(rates) > 1}
            self.runs.trained([run for of_way in wanted.values() for run in of_way])
            losses = {way: [final_loss(self.runs.known[run["name"]]) for run in of_way] for way, of_way in wanted.items()}
            return {way: large_batch.best_rate(rates, losses.get(way, [0.0])) for way, rates in rates_of.items()}

        factors, grid = self.size["factors"], OPTIMIZERS[self.study][1]
        first = best({"synchronous": grid if len(factors) > 1 else grid[:1]})
        others = [way for way, of in WAYS.items() if of.rate_of == way and way not in first]
        self.rates = first | best({way: [first["synchronous"] * factor for factor in factors] for way in others})

    def row(self, way, clock, found):
        """Returns the results of a way under a clock: {way, clock, rate, runs}. `found`: the result of each seed's
        run."""
        of_runs = []
        for seed, run in zip(self.size["seeds"], found):
            timeline = self.timeline(way, clock, seed)
            lived = WAYS[way].kind == "lived"
            seconds = run["seconds"] if lived else timeline.seconds()
            made = curve(moments_of(run, None if lived else timeline))
            of_runs.append({"curve": made, "seconds": seconds, "samples": BATCH * sum(len(of["losses"]) for of in run["ranks"])}
                           | forecast_of(way, timeline)
                           | {name: run[name] for name in ("staleness_mean", "staleness_max", "dropped", "held_out_loss")})
        return {"way": way, "clock": clock, "rate": self.rates[WAYS[way].rate_of], "runs": of_runs}

    def made(self):
        """Returns {costs, rows, forecasts}."""
        self.tune()
        wanted = {(way, clock): [self.run(way, clock, self.rates[of.rate_of], seed) for seed in self.size["seeds"]]
                  for way, of in WAYS.items() for clock in self.size["clocks"]}
        by_name = {run["name"]: run for of_seeds in wanted.values() for run in of_seeds}
        forecasts = self.forecast_runs() if self.study == "digits" else []
        self.runs.trained([*by_name.values(), *(run for _, _, run in forecasts)])
        for path in self.runs.folder.glob(f"{self.study}_order_*"):
            path.unlink()
        rows = [self.row(way, clock, [self.runs.known[run["name"]] for run in of_seeds]) for (way, clock), of_seeds in wanted.items()]
        return {"costs": self.costs._asdict(), "rows": rows,
                "forecasts": [{"way": way, "clock": clock} | forecast_of(way, self.timeline(way, clock, run["seed"]))
                              | {name: self.runs.known[run["name"]][name] for name in ("seconds", "staleness_mean")}
                              for way, clock, run in forecasts]}

    def forecast_runs(self):
        """Returns (way, clock, run) of runs that keep the clock, to compare their seconds with the simulation's."""
        seed, found = self.size["seeds"][0], []
        for way in FORECAST:
            rate = self.rates[WAYS[way].rate_of]
            for clock in self.size["clocks"]:
                timeline = self.timeline(way, clock, seed)
                run = run_of(self.study, way, rate, seed, timeline, f"lived {way} {clock} {rate:g} {seed}")
                found.append((way, clock, run | {"clock": self.clock(clock)}))
        return found


def measured(options, path):
    """Trains, and returns the results. Studies that are not wanted now stay as they were."""
    earlier = results.read(path)["studies"] if path.exists() else {}
    about = {"commit": machine.commit(), "machine": machine.facts(), "small": options.size is not WHOLE, "size": options.size}
    studies = {study: about | Study(Runs(options, study)).made() for study in options.only}
    return {"schema": results.SCHEMA, "where": "asynchronous", "studies": earlier | studies}


# These functions make the page.

def seconds_text(value):
    return f"{value:.1f}"


def reached(row, wanted):
    """Returns a text with the seconds until a loss is reached. It says how many seeds reach the loss if not all do."""
    times = [time for of_run in row["runs"] if (time := seconds_to(of_run["curve"], wanted)) is not None]
    if not times:
        return "not reached"
    return spread(times, seconds_text) + ("" if len(times) == len(row["runs"]) else f" ({len(times)} of {len(row['runs'])} seeds)")


def staleness(row):
    mean = spread([of_run["staleness_mean"] for of_run in row["runs"]], lambda value: f"{value:.2f}")
    return f"{mean}, {max(of_run['staleness_max'] for of_run in row['runs'])}"


def clock_table(rows, wanted):
    """Returns the table of the ways under one clock."""
    plain = next(row for row in rows if row["way"] == "synchronous")
    lines = ["| way | rate | samples/s | of synchronous | staleness: mean, max | dropped | held-out loss | "
             f"s to loss {loss(wanted)} | lost at a death |",
             "|---|---:|---:|---:|---:|---:|---:|---:|---|"]

    def samples_s(row):
        return [of_run["samples"] / of_run["seconds"] for of_run in row["runs"]]

    for row in rows:
        way, dropped = WAYS[row["way"]], [of_run["dropped"] for of_run in row["runs"]]
        cells = [way.label, f"{row['rate']:g}", spread(samples_s(row), seconds_text),
                 f"{statistics.fmean(samples_s(row)) / statistics.fmean(samples_s(plain)):.2f}", staleness(row),
                 spread(dropped, lambda value: f"{value:.0f}") if any(dropped) else "",
                 spread([of_run["held_out_loss"] for of_run in row["runs"]], loss), reached(row, wanted), way.at_a_death]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def forecast_table(study):
    """Returns a table of all runs that kept their clock. It has the seconds and the mean staleness, both measured and
    simulated."""
    lines = ["| way | clock | measured s | simulated s | measured less simulated | staleness measured | simulated |",
             "|---|---|---:|---:|---:|---:|---:|"]
    lived = [{"way": row["way"], "clock": row["clock"]} | row["runs"][0] for row in study["rows"] if WAYS[row["way"]].kind == "lived"]
    for each in study["forecasts"] + lived:
        off, expected = each["seconds"] / each["expected_s"] - 1, each["expected_staleness"]
        ages = ["", ""] if expected is None else [f"{each['staleness_mean']:.2f}", f"{expected:.2f}"]
        cells = [WAYS[each["way"]].label, CLOCKS[each["clock"]], f"{each['seconds']:.1f}", f"{each['expected_s']:.1f}", f"{percent(off)} %", *ages]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def best_line(rows, wanted, clock):
    """Returns a line that says which way reaches the loss first under a clock."""
    times = {row["way"]: [seconds_to(of_run["curve"], wanted) for of_run in row["runs"]] for row in rows}
    means = {way: statistics.fmean(each) for way, each in times.items() if None not in each}
    if not means:
        return f"Under this clock ({CLOCKS[clock]}) no way came to {loss(wanted)} with every seed."
    first = min(means, key=means.get)
    others = f"; synchronous took {means['synchronous']:.1f} s" if first != "synchronous" and "synchronous" in means else ""
    return f"First at {loss(wanted)}: {WAYS[first].label}, {means[first]:.1f} s{others}."


def tables_of(name, study):
    """Returns the lines of a study between its marks."""
    wanted, size = wanted_loss(study["rows"]), study["size"]
    costs = ", ".join(f"{key[:-2]} {1e3 * value:.2f} ms" for key, value in study["costs"].items())
    lines = [f"{large_batch.how(study)} {size['steps'][name]} steps of {RANKS} x {BATCH} samples, seeds {', '.join(map(str, size['seeds']))}, "
             f"{size['step_s'][name]:g} s of compute a step. Beside it: {costs}. Mean over seeds ± half of the range. The loss to reach is that of "
             f"the synchronous run at {100 * LOSS_AT:.0f} % of its steps."]
    for clock in size["clocks"]:
        label, rows = CLOCKS[clock], [row for row in study["rows"] if row["clock"] == clock]
        lines += ["", f"### {name.capitalize()}: {label}", "", *clock_table(rows, wanted), "", best_line(rows, wanted, clock), "",
                  f"![{name}, {label}: loss by seconds](asynchronous/{name}_{clock}_seconds.svg)", "",
                  f"![{name}, {label}: loss by samples](asynchronous/{name}_{clock}_samples.svg)"]
    return [*lines, "", f"### {name.capitalize()}: seconds measured and simulated", "",
            "Runs that kept their clock, with the first seed. Wanted: within 20 %.", "", *forecast_table(study)]


TABLES = {study: functools.partial(tables_of, study) for study in STUDIES}


def series(rows, axis):
    """Returns the curves of rows for a picture. Their points are means over seeds. `axis`: "seconds" or "samples"."""
    found = []
    for row in rows:
        curves = [of_run["curve"] for of_run in row["runs"]]
        losses = [statistics.fmean(each) for each in zip(*(of["losses"] for of in curves))]
        if axis == "seconds":
            places = [statistics.fmean(each) for each in zip(*(of["ends"] for of in curves))]
        else:
            places = [row["runs"][0]["samples"] * (part + 1) / BUCKETS for part in range(BUCKETS)]
        found.append({"label": WAYS[row["way"]].label, "points": [point for point in zip(places, losses) if math.isfinite(point[1])]})
    return found


def draw(name, study, folder):
    """Writes the pictures of a study."""
    import plots  # only this module needs matplotlib

    folder.mkdir(exist_ok=True)
    for clock in study["size"]["clocks"]:
        rows = [row for row in study["rows"] if row["clock"] == clock]
        for axis in ("seconds", "samples"):
            drawn = series(rows, axis)
            top = max((points[0][1] for each in drawn if (points := each["points"])), default=1.0)
            title = f"{name}, {CLOCKS[clock]}: loss by {axis}"
            figure = plots.curves(drawn, axis, "training loss, mean over seeds", (0, 1.05 * top))
            (folder / f"{name}_{clock}_{axis}.svg").write_text(plots.svg(figure, title, inline=False))


def expect_finite(studies):
    """Ends the program with exit code 1 if a loss is not finite. No way should diverge in a few steps."""
    for name, study in studies.items():
        wrong = {row["way"] for row in study["rows"] for of_run in row["runs"]
                 if not all(map(math.isfinite, [*of_run["curve"]["losses"], of_run["held_out_loss"]]))}
        if wrong:
            sys.exit(f"asynchronous.py: {name}: losses that are not finite: {', '.join(sorted(wrong))}")


def main():
    options = parse_arguments()
    path, page = options.out / "asynchronous.json.xz", options.out / "asynchronous.md"
    if not options.runs and not path.exists():
        sys.exit(f"asynchronous.py: {path.name} is not there. hint: --runs FOLDER makes it")
    options.out.mkdir(parents=True, exist_ok=True)
    data = results.write(path, measured(options, path)) if options.runs else results.read(path)
    if options.page:
        page.write_text(large_batch.filled(page.read_text(), data["studies"], TABLES))
        for name, study in data["studies"].items():
            draw(name, study, options.out / "asynchronous")
        return
    for name, study in data["studies"].items():
        print(f"\n## {name}\n\n" + "\n".join(tables_of(name, study)))
    if options.quick:
        expect_finite(data["studies"])


if __name__ == "__main__":
    main()
