#!/usr/bin/env python3
"""Studies how far a batch can grow under SGD, AdamW, LARS and LAMB. Training uses the learning rate of a small batch,
either unchanged, or scaled and warmed up.

    benchmarks/large_batch.py --runs FOLDER            trains missing runs, and writes results/large_batch.json.xz
    benchmarks/large_batch.py --runs FOLDER --small    a small form of the runs: about half an hour on two cores
    benchmarks/large_batch.py --page                   fills the tables of docs/recipes/large_batch.md from the results

`--runs` and `--page` can be given together. Runs that FOLDER already has are not made again, so a study that was
stopped continues. A folder may have only runs of the small form or only runs of the whole form.

There are three studies. `digits` uses the digits of this Python's scikit-learn, or those of --digits FILE, which
examples/images/digits.py writes. `text` is a small GPT on LibTorch's headers. `wire` shows what compression and outer
steps cost and save at a large batch of the text.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys

import harness
import large_batch_text
import machine
import results
from demo_text import make_data
from launch import built_package
from works import REPOSITORY

FOLDER = REPOSITORY / "benchmarks"
PAGE = REPOSITORY / "docs/recipes/large_batch.md"
STUDIES = ("digits", "text", "wire")
BASE = 32
TRAINING_DIGITS, WARM_UP_EPOCHS = 1437, 2
TUNING_SEED = 0
LINEAR, ROOT = "linear", "square_root"
# Each entry is an optimizer: its keys, how its rate grows with the batch, and the rates from which the best rate
# for the base batch is chosen.
OPTIMIZERS = {
    "SGD": ({"type": "sgd", "momentum": 0.9, "weight_decay": 1e-4}, LINEAR, {"digits": [0.01, 0.03, 0.1], "text": [0.03, 0.1, 0.3]}),
    "AdamW": ({"type": "adamw", "weight_decay": 0.01}, ROOT, {"digits": [3e-4, 1e-3, 3e-3], "text": [5e-4, 1.5e-3, 5e-3]}),
    "LARS": ({"type": "lars", "momentum": 0.9, "weight_decay": 1e-4}, LINEAR, {"digits": [1.0, 3.0, 10.0], "text": [1.0, 3.0, 10.0]}),
    "LAMB": ({"type": "lamb", "weight_decay": 0.01}, ROOT, {"digits": [3e-3, 1e-2, 3e-2], "text": [3e-3, 1e-2, 3e-2]}),
}
PLAIN, SCALED = "rate of 32", "scaled, warmed up"
WHOLE = {"epochs": 40, "seeds": [1, 2, 3], "batches": [32, 64, 128, 256], "text_samples": 65536, "text_seeds": [1, 2, 3],
         "text_batches": [32, 128, 512, 1024], "tuning_samples": 8192, "wire_batch": 512, "wire_steps": 65, "wire_seeds": [1, 2, 3]}
SMALL = WHOLE | {"epochs": 15, "text_samples": 8192, "text_batches": [32, 1024], "tuning_samples": 1024, "wire_batch": 128,
                 "wire_steps": 17}
NOT_IN_NAMES = ("epochs", "wire_steps")  # sizes that are not part of a run's name
# Each entry is a contender of the study `wire`: its label, and the keys that its strategy has in addition to those of
# "plain".
OUTER = {"mesh": {"replicate": 2, "shard": 1}}
WIRE = {
    "plain": ("gradients in every step, fp32", {}),
    "int8": ("gradients in every step, int8, sums too", {"compression": {"gradients": "int8", "sums": "int8"}}),
    "power_sgd": ("gradients in every step, PowerSGD of rank 4", {"compression": {"method": {"type": "power_sgd", "rank": 4}}}),
    "local_sgd": ("local SGD, every 8 steps", OUTER | {"sync": {"type": "local_sgd", "every": 8}}),
    "diloco": ("DiLoCo, every 8 steps, outer lr 0.7, momentum 0.5",
               OUTER | {"sync": {"type": "diloco", "every": 8, "outer": {"lr": 0.7, "momentum": 0.5}}}),
    "diloco_int8": ("the same, outer gradients in int8",
                    OUTER | {"sync": {"type": "diloco", "every": 8, "outer": {"lr": 0.7, "momentum": 0.5}},
                             "compression": {"gradients": "int8", "axes": "replicate"}}),
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=pathlib.Path, metavar="FOLDER", help="for what runs gave, a line each")
    parser.add_argument("--small", action="store_true", help="fewer epochs, sequences, batches and seeds")
    parser.add_argument("--only", nargs="+", choices=STUDIES, default=list(STUDIES), metavar="STUDY", help=", ".join(STUDIES))
    parser.add_argument("--digits", type=pathlib.Path, metavar="FILE", help="what examples/images/digits.py writes")
    parser.add_argument("--page", action="store_true", help="fills the tables of the page")
    parser.add_argument("--out", type=pathlib.Path, default=FOLDER / "results", metavar="FOLDER", help="of large_batch.json.xz")
    options = parser.parse_args()
    if not options.runs and not options.page:
        parser.error("--runs, --page or both are wanted")
    return options


# These functions make the runs: they set what is trained, and how.

def strategy(optimizer, rate, batch, way, schedule, rise):
    """Returns a strategy. `schedule`: keys of lr_schedule that all runs have. `rise`: keys of the warm-up."""
    keys, scaling, _ = OPTIMIZERS[optimizer]
    schedule = {"type": "cosine"} | schedule
    if way == SCALED:
        # The warm-up begins at the learning rate of the base batch.
        begin = BASE / batch if scaling == LINEAR else math.sqrt(BASE / batch)
        schedule |= {"base_batch_size": BASE, "batch_scaling": scaling, "warmup_from": begin} | rise
    return {"optimizer": keys | {"lr": rate}, "lr_schedule": schedule, "noise_scale": {"every": 1, "smoothing": 0.0}}


def ways(batch):
    """Returns the ways to choose the rate. At the base batch both ways give the same rate, so only one is returned."""
    return (PLAIN,) if batch == BASE else (PLAIN, SCALED)


def digits_run(size, optimizer, rate, batch, way, seed):
    steps = size["epochs"] * math.ceil(TRAINING_DIGITS / batch)
    rise = {"warmup_epochs": WARM_UP_EPOCHS, "epoch_samples": TRAINING_DIGITS}
    made = strategy(optimizer, rate, batch, way, {"total_steps": steps}, rise)
    return {"name": f"digits {optimizer} {rate:g} {batch} {way} {seed}", "batch": batch, "seed": seed, "epochs": size["epochs"],
            "strategy": made | {"strategy": "NO_SHARD", "gradient_accumulation": 2}}


def text_run(samples, optimizer, rate, batch, way, seed):
    steps = samples // batch
    made = strategy(optimizer, rate, batch, way, {"total_steps": steps, "min_ratio": 0.1}, {"warmup_samples": samples // 8})
    return {"name": f"text {samples} {optimizer} {rate:g} {batch} {way} {seed}", "batch": batch, "seed": seed, "steps": steps,
            "strategy": made | {"strategy": "NO_SHARD"}}


def wire_run(size, contender, batch, rate, seed):
    samples = size["wire_batch"] * size["wire_steps"]
    steps = samples // batch
    made = strategy("AdamW", rate, batch, PLAIN if batch == BASE else SCALED, {"total_steps": steps, "min_ratio": 0.1},
                    {"warmup_samples": samples // 8})
    del made["noise_scale"]
    return {"name": f"wire {contender} {rate:g} {batch} {seed} {large_batch_text.WIRE_RATE}", "batch": batch, "seed": seed, "steps": steps,
            "counts_bytes": True, "strategy": made | {"strategy": "NO_SHARD", "comm": {"transport": "gloo"}} | WIRE[contender][1]}


class Runs:
    """Results of runs, by their names. Each is a line of FOLDER/runs.jsonl."""

    def __init__(self, options, size):
        self.options, self.size = options, size
        options.runs.mkdir(parents=True, exist_ok=True)
        form = options.runs / "form.json"
        earlier = json.loads(form.read_text()) if form.exists() else size
        if any(earlier[key] != size[key] for key in NOT_IN_NAMES):
            sys.exit(f"large_batch.py: {options.runs} has runs of another form. hint: give another folder, or --small as before")
        form.write_text(json.dumps(size))
        self.path = options.runs / "runs.jsonl"
        self.binary = harness.binary()
        self.known = self._read()

    def _read(self):
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {run["name"]: run for run in map(json.loads, lines)}

    def of_digits(self, wanted):
        """Trains the runs that have no result yet, in one process, and returns the results of all runs."""
        left = [run for run in wanted if run["name"] not in self.known]
        if left:
            plan = self.options.runs / "digits_runs.json"
            plan.write_text(json.dumps(left))
            words = [sys.executable, FOLDER / "large_batch_digits.py", digits_file(self.options), plan, self.path]
            if subprocess.run(words, env=os.environ | built_package(self.binary)).returncode != 0:
                sys.exit("large_batch.py: the digits could not be trained")
            self.known = self._read()
        return [self.known[run["name"]] for run in wanted]

    def of_text(self, wanted):
        data = make_data(self.options.runs)
        for run in wanted:
            if run["name"] in self.known:
                continue
            self.known[run["name"]] = found = {"name": run["name"]} | large_batch_text.trained(self.binary, self.options.runs, data, run)
            with open(self.path, "a", encoding="utf-8") as lines:
                lines.write(json.dumps(found) + "\n")
            print(f"large_batch.py: {run['name']}: {found['held_out_loss']:.4f}", flush=True)
        return [self.known[run["name"]] for run in wanted]


def digits_file(options):
    """Returns the file of the digits: `options.digits`, or a file in the folder `options.runs`, which is written if it
    is not there. Ends the program if this Python has no digits."""
    if options.digits:
        return options.digits
    path = options.runs / "digits.csv"
    if path.exists():
        return path
    made = subprocess.run([sys.executable, REPOSITORY / "examples/images/digits.py", path], capture_output=True, text=True)
    if made.returncode != 0:
        print(f"{pathlib.Path(sys.argv[0]).name}: this Python has no scikit-learn, which has the digits. hint: pip install scikit-learn, or "
              "--digits FILE, which examples/images/digits.py writes where there is one", file=sys.stderr)
        raise SystemExit(harness.EXIT_UNAVAILABLE)
    return path


def best_rate(rates, losses):
    """Returns the rate with the least training loss. A run that diverged has no training loss."""
    return min(zip(rates, losses), key=lambda each: each[1] if math.isfinite(each[1]) else math.inf)[0]


def rate_of(runs, study, optimizer):
    """Returns the learning rate in OPTIMIZERS with which training at the base batch has the least training loss. The
    runs that find this rate have a seed that the study does not use."""
    rates = OPTIMIZERS[optimizer][2][study]
    if study == "digits":
        found = runs.of_digits([digits_run(runs.size, optimizer, rate, BASE, PLAIN, TUNING_SEED) for rate in rates])
    else:
        found = runs.of_text([text_run(runs.size["tuning_samples"], optimizer, rate, BASE, PLAIN, TUNING_SEED) for rate in rates])
    return best_rate(rates, [run["loss"] for run in found])


def grown(runs, study):
    """Makes the study. Returns a row for each optimizer and each way to choose the rate: {optimizer, way, rate, cells:
    [{batch, runs}]}."""
    size, rows = runs.size, []
    batches, seeds = (size["batches"], size["seeds"]) if study == "digits" else (size["text_batches"], size["text_seeds"])
    for optimizer in OPTIMIZERS:
        rate = rate_of(runs, study, optimizer)
        for way in (PLAIN, SCALED):
            cells = []
            for batch in [batch for batch in batches if way in ways(batch)]:
                if study == "digits":
                    found = runs.of_digits([digits_run(size, optimizer, rate, batch, way, seed) for seed in seeds])
                else:
                    found = runs.of_text([text_run(size["text_samples"], optimizer, rate, batch, way, seed) for seed in seeds])
                cells.append({"batch": batch, "runs": found})
            rows.append({"optimizer": optimizer, "way": way, "rate": rate, "cells": cells})
    return rows


def on_the_wire(runs):
    """Makes the study: every contender at the large batch, and "plain" at the base batch too."""
    rate, large = rate_of(runs, "text", "AdamW"), runs.size["wire_batch"]
    return [{"contender": contender, "label": WIRE[contender][0], "batch": batch, "rate": rate,
             "runs": runs.of_text([wire_run(runs.size, contender, batch, rate, seed) for seed in runs.size["wire_seeds"]])}
            for contender, batch in [("plain", BASE), *((contender, large) for contender in WIRE)]]


def measured(options, path):
    """Trains, and returns the results. Studies that this call does not repeat keep their earlier results."""
    size = SMALL if options.small else WHOLE
    runs = Runs(options, size)
    earlier = results.read(path)["studies"] if path.exists() else {}
    about = {"commit": machine.commit(), "machine": machine.facts(), "small": options.small, "size": size}
    studies = {study: about | {"rows": on_the_wire(runs) if study == "wire" else grown(runs, study)} for study in options.only}
    return {"schema": results.SCHEMA, "where": "large_batch", "studies": earlier | studies}


# These functions make the page.

def spread(values, form):
    """Returns the mean over seeds, and half of the difference between the largest and the smallest value."""
    values = [value for value in values if value is not None and math.isfinite(value)]
    if not values:
        return "diverged"
    middle = form(statistics.mean(values))
    return middle if len(values) == 1 else f"{middle} ± {form((max(values) - min(values)) / 2)}"


def percent(value):
    return f"{100 * value:.1f}"


def loss(value):
    return f"{value:.3f}"


def count(value):
    return f"{value:.3g}"


def table_of(rows, of_run, form, unknown=None):
    """Returns a table of batches, with a row for each optimizer and each way to choose the rate. `unknown`: the text of
    a cell without a number."""
    batches = [cell["batch"] for cell in rows[0]["cells"]]
    lines = ["| optimizer | way | rate at 32 | " + " | ".join(map(str, batches)) + " |", "|---|---|---:|" + "---:|" * len(batches)]
    for row in rows:
        cells = {cell["batch"]: spread([of_run(run) for run in cell["runs"]], form) for cell in row["cells"]}
        words = [cells.get(batch, "").replace("diverged", unknown or "diverged") for batch in batches]
        lines.append(f"| {row['optimizer']} | {row['way']} | {row['rate']:g} | " + " | ".join(words) + " |")
    return lines


def how(study):
    """Returns a line that says how a study was made."""
    form = "The small form, whose runs are short: it shows the way, and its numbers say little." if study["small"] else "The whole form."
    changed = ", with changes" if study["commit"]["dirty"] else ""
    return f"{form} Commit {study['commit']['hash'][:7]}{changed}, {study['machine']['cpu']}, {study['machine']['cores']} cores."


def digits_tables(study):
    rows, size = study["rows"], study["size"]
    return [how(study) + f" {size['epochs']} epochs, seeds {', '.join(map(str, size['seeds']))}.", "",
            "Accuracy on held-out pictures, in percent: mean over seeds ± half of the range.", "",
            *table_of(rows, lambda run: run["held_out_accuracy"], percent), "",
            "Generalisation gap: held-out loss - training loss, both after training.", "",
            *table_of(rows, lambda run: run["held_out_loss"] - run["loss"], loss), "",
            "Gradient noise scale in samples, over the second half of the steps.", "",
            *table_of(rows, lambda run: run["noise_scale"], count, "not known")]


def text_tables(study):
    rows, size = study["rows"], study["size"]
    return [how(study) + f" {size['text_samples']} sequences of {large_batch_text.SEQ_LEN} bytes in every run, "
            f"seeds {', '.join(map(str, size['text_seeds']))}.", "",
            "Held-out loss: mean over seeds ± half of the range.", "",
            *table_of(rows, lambda run: run["held_out_loss"], loss), "",
            "Generalisation gap: held-out loss - training loss of the last tenth of the steps.", "",
            *table_of(rows, lambda run: run["held_out_loss"] - run["loss"], loss), "",
            "Gradient noise scale in sequences, over the second half of the steps.", "",
            *table_of(rows, lambda run: run["noise_scale"], count, "not known")]


def wire_table(study):
    size = study["size"]
    samples = size["wire_batch"] * size["wire_steps"]
    lines = [how(study) + f" {samples} sequences in every run, seeds {', '.join(map(str, size['wire_seeds']))}. The gap is held-out loss - "
             "training loss of the last tenth of the steps.", "",
             "| what is sent | batch | held-out loss | generalisation gap | MB a step | MB in all | s |", "|---|---:|---:|---:|---:|---:|---:|"]
    for row in study["rows"]:
        sent = [run["bytes_a_step"] / 1e6 for run in row["runs"] if run.get("bytes_a_step") is not None]
        in_all = [each * (samples // row["batch"]) for each in sent]
        cells = [row["label"], str(row["batch"]), spread([run["held_out_loss"] for run in row["runs"]], loss),
                 spread([run["held_out_loss"] - run["loss"] for run in row["runs"]], loss), *(
                     spread(each, count) if each else "not counted" for each in (sent, in_all)),
                 f"{spread([run['s'] for run in row['runs']], percent)} %"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


TABLES = {"digits": digits_tables, "text": text_tables, "wire": wire_table}


def filled(page, studies, tables=None):
    """Returns the page with these studies' tables between their marks. `tables`: {study: a function that makes its
    lines}; TABLES if it is None. Raises ValueError if a mark is missing."""
    tables = tables or TABLES
    for name, study in studies.items():
        begin, end = f"<!-- table: {name} -->\n", f"<!-- end of table: {name} -->\n"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page has no place for the table {name}: {begin.strip()}")
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = before + begin + "\n" + "\n".join(tables[name](study)) + "\n\n" + end + after
    return page


def main():
    options = parse_arguments()
    path = options.out / "large_batch.json.xz"
    if not options.runs and not path.exists():
        sys.exit(f"large_batch.py: {path.name} is not there. hint: --runs FOLDER makes it")
    data = results.write(path, measured(options, path)) if options.runs else results.read(path)
    if options.page:
        PAGE.write_text(filled(PAGE.read_text(), data["studies"]))


if __name__ == "__main__":
    main()
