#!/usr/bin/env python3
"""Measures over several seeds how much worse a model learns if ranks send less. Either replicas exchange their values
only in outer steps (streaming DiLoCo with int4), or ranks compress gradients. Both ways are compared with gradients
that are summed uncompressed in every step.

    benchmarks/learning.py --runs FOLDER                      trains runs whose metrics FOLDER lacks, then writes
                                                              results/learning.{json.xz,md,svg}
    benchmarks/learning.py --runs FOLDER --set compression    the same for results/learning_compression.*
    benchmarks/learning.py --redraw                           draws the results

The model is `scripts/demo`'s GPT of 10.9 million parameters (fp32, AdamW, 400 steps of 2 ranks with 4 samples of 128
bytes, a cosine learning rate). It is trained on LibTorch's headers in ATen/, and evaluated on those in c10/. Each rank
counts as one host. Replicas exchange their values at the checkpoint after step 399. They make one more step from the
outer weights, and the evaluation follows. If the results already have a run with the same strategy and seed, it is not
made again.

If the user may make a network namespace (root), the bytes over its loopback are counted in 2 x `every` steps ("sync"),
or in 10 steps without "sync". This program needs the torch whose headers are read, and matplotlib, which draws
(benchmarks/setup).
"""

import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

import harness
import machine
import plots
import results
from demo_text import make_data
from launch import steps_of
from works import REPOSITORY

STEPS, SAVED = 400, 399
FIRST, WINDOW = 20, 20  # first step of the curve, and number of steps for each mean


def strategy(every=None, momentum=0.0, lr=1.0, mix=0.5):
    base = {"strategy": "NO_SHARD", "units": {"classes": ["Block"]}, "gradient_clipping": 1.0,
            "optimizer": {"type": "adamw", "lr": 1.5e-3, "betas": [0.9, 0.95], "weight_decay": 0.1},
            "lr_schedule": {"type": "cosine", "warmup_steps": 20, "total_steps": STEPS, "min_ratio": 0.1},
            "comm": {"transport": "gloo"}}
    if every is None:
        return base
    return base | {"mesh": {"replicate": 2, "shard": 1},
                   "compression": {"gradients": "int4", "sums": "int4", "axes": "replicate"},
                   "sync": {"type": "streaming_diloco", "every": every, "fragments": 4, "delay": 1, "mix": mix,
                            "outer": {"lr": lr, "momentum": momentum}}}


def compressed(start=0, freeze=0, **compression):
    base = strategy()
    if freeze:
        base["optimizer"]["freeze_step"] = freeze
    return base | {"compression": compression | ({"start_step": start} if start else {})}


PLAIN = {"plain": ("gradients summed in every step, fp32", strategy())}
MEETINGS = PLAIN | {
    "h20_m9": ("every 20 steps, outer lr 0.7, momentum 0.9", strategy(20, 0.9, 0.7)),
    "h20_m5": ("every 20 steps, outer lr 0.7, momentum 0.5", strategy(20, 0.5, 0.7)),
    "h20_m0": ("every 20 steps, outer lr 1, no momentum", strategy(20)),
    "h20_m0_mix0": ("every 20 steps, outer lr 1, no momentum, mix 0", strategy(20, mix=0.0)),
    "h14_m5": ("every 14 steps, outer lr 0.7, momentum 0.5", strategy(14, 0.5, 0.7)),
    "h14_m0": ("every 14 steps, outer lr 1, no momentum", strategy(14)),
}
COMPRESSION = PLAIN | {
    "bf16": ("bf16 on the wire", strategy() | {"mixed_precision": {"param": "fp32", "reduce": "bf16"}}),
    "int8": ("int8, sums too", compressed(gradients="int8", sums="int8")),
    "int8_gathers": ("FULL_SHARD, int8, parameters too", compressed(gradients="int8", gathers="int8") | {"strategy": "FULL_SHARD"}),
    "power_sgd_16": ("PowerSGD of rank 16 after 40 plain steps", compressed(40, method={"type": "power_sgd", "rank": 16})),
    "top_10": ("top 10 % after 40 plain steps", compressed(40, method={"type": "top_k", "fraction": 0.1})),
    "one_bit_80": ("one bit of gradients after 80 plain steps", compressed(80, method={"type": "one_bit"})),
    "one_bit_adam_80": ("one bit of gradients after 80 plain steps, second moments stay",
                        compressed(80, 80, method={"type": "one_bit"})),
    "one_bit_momentum_40": ("one bit of momentum after 40 plain steps, second moments stay",
                            compressed(40, 40, method={"type": "one_bit", "momentum": 0.9})),
    "one_bit_momentum_80": ("one bit of momentum after 80 plain steps, second moments stay",
                            compressed(80, 80, method={"type": "one_bit", "momentum": 0.9})),
}
SETS = {"meetings": ("learning", "Learning with fewer meetings of replicas", MEETINGS),
        "compression": ("learning_compression", "Learning with compressed gradients", COMPRESSION)}
CONTENDERS = MEETINGS | COMPRESSION


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    drawn = parser.add_mutually_exclusive_group(required=True)
    drawn.add_argument("--runs", type=pathlib.Path, metavar="FOLDER", help="for metrics, NAME.SEED.jsonl")
    drawn.add_argument("--redraw", action="store_true", help="trains nothing")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", choices=SETS, default="meetings")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the set")
    parser.add_argument("--out", type=pathlib.Path, default=REPOSITORY / "benchmarks/results", metavar="FOLDER")
    options = parser.parse_args()
    options.stem, options.title, contenders = SETS[options.set]
    if unknown := sorted(set(options.only or []) - set(contenders)):
        parser.error(f"--only: unknown {', '.join(unknown)}; there are {', '.join(contenders)}")
    options.only = [name for name in contenders if name == "plain" or name in (options.only or contenders)]
    return options


def command(binary, name, data, more, of=None):
    """Returns the command that trains with the contender's strategy, or with the strategy `of`."""
    path = data[1].parent / f"{name}.json"
    path.write_text(json.dumps(of or CONTENDERS[name][1]))
    return [binary, "launch", "-n", "2", "--no-prefix", "--", binary, "train", "--model",
            REPOSITORY / "examples/configs/gpt_10m.json", "--strategy", path, "--data", data[0], "--extensions", ".h", *more]


def run(words):
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    done = subprocess.run([str(word) for word in words], env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                          capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"learning.py: {' '.join(map(str, words[-12:]))} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def train(binary, name, seed, folder, data):
    metrics, saved = folder / f"{name}.{seed}.jsonl", folder / f"{name}.{seed}.saved"
    if metrics.exists():
        return
    unfinished = folder / "unfinished.jsonl"
    run(command(binary, name, data, [
        "--steps", STEPS, "--batch", 4, "--seed", seed, "--log-every", STEPS, "--eval-data", data[1], "--eval-batches", 40,
        "--checkpoint-dir", saved, "--every-steps", SAVED, "--keep", 1, "--metrics", unfinished, "--overwrite"]))
    shutil.rmtree(saved, ignore_errors=True)
    unfinished.rename(metrics)
    print(f"learning.py: {name}, seed {seed}: {read(metrics)['eval_loss']:.4f}", flush=True)


def wire_bytes(binary, name, data):
    """Returns the bytes that both ranks send in a step that compresses (the first steps of a run may not). Returns None
    if no network namespace can be made."""
    of = CONTENDERS[name][1]
    # A method sends as many bytes with momentum as without. Momentum needs uncompressed steps at the beginning of a
    # run, so the measured run has no momentum.
    if "compression" in of:
        rest = {key: value for key, value in of["compression"].items() if key != "start_step"}
        if "method" in rest:
            rest["method"] = {key: value for key, value in rest["method"].items() if key != "momentum"}
        of = of | {"compression": rest}

    def sent(steps):
        inside = ["sh", "-c", 'ip link set lo up && "$@" >/dev/null && grep lo: /proc/net/dev', "sh"]
        words = command(binary, name, data, ["--steps", steps, "--batch", 1, "--seq-len", 16, "--log-every", steps], of)
        return int(run(["unshare", "-n", *inside, *words]).split()[1])

    try:
        subprocess.run(["unshare", "-n", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    steps = 2 * CONTENDERS[name][1].get("sync", {}).get("every", 5)
    return (sent(1 + steps) - sent(1)) / steps


def read(metrics):
    """Returns {"losses": [the loss of each step, of one replica], "eval_loss"}."""
    evaluations = [json.loads(line) for line in metrics.read_text().splitlines() if '"eval_loss"' in line]
    return {"losses": [line["loss"] for line in steps_of(metrics)], "eval_loss": evaluations[0]["eval_loss"]}


def earlier_of(options):
    """Returns {contender: its earlier results} for the contenders whose strategy is still the same."""
    path = options.out / f"{options.stem}.json.xz"
    found = results.read(path)["contenders"] if path.exists() else []
    return {of["name"]: of for of in found if of["strategy"] == CONTENDERS.get(of["name"], ("", None))[1]}


def measured(options):
    """Returns the results. Earlier results stay if their strategy has not changed."""
    options.runs.mkdir(parents=True, exist_ok=True)
    binary, data, earlier = harness.binary(), make_data(options.runs), earlier_of(options)
    for seed in options.seeds:
        for name in options.only:
            train(binary, name, seed, options.runs, data)
    contenders = []
    for name in [name for name in SETS[options.set][2] if name in options.only or name in earlier]:
        known = earlier.get(name, {"runs": [], "wire_bytes_a_step": None})
        runs = {run["seed"]: run for run in known["runs"]}
        runs |= {seed: {"seed": seed, **read(path)} for seed in options.seeds
                 if (path := options.runs / f"{name}.{seed}.jsonl").exists()}
        wire = wire_bytes(binary, name, data) if name in options.only else known["wire_bytes_a_step"]
        contenders.append({"name": name, "label": CONTENDERS[name][0], "strategy": CONTENDERS[name][1], "wire_bytes_a_step": wire,
                           "runs": [runs[seed] for seed in sorted(runs)]})
    return {"schema": results.SCHEMA, "where": "learning", "commit": machine.commit(), "machine": machine.facts(), "contenders": contenders}


def more_than(plain, contender):
    """Returns {seed: how much higher the held-out loss is than that of the plain run with this seed}."""
    of_plain = {run["seed"]: run["eval_loss"] for run in plain["runs"]}
    return {run["seed"]: run["eval_loss"] / of_plain[run["seed"]] - 1 for run in contender["runs"] if run["seed"] in of_plain}


def page(data, title, stem):
    plain = data["contenders"][0]
    lines = [f"# {title}", "", __doc__.split("\n\n")[2].replace("\n", " "), "",
             f"`benchmarks/learning.py --set {next(key for key, of in SETS.items() if of[0] == stem)}`, drawn at commit {data['commit']['hash']}, {data['machine']['cpu']}.", "",
             "| contender | bytes of a step, times fewer | held-out loss by seed | above the plain run, by seed | mean |",
             "| --- | ---: | --- | --- | ---: |"]
    for contender in data["contenders"]:
        losses = ", ".join(f"{run['eval_loss']:.4f}" for run in contender["runs"])
        wire, of_plain = contender["wire_bytes_a_step"], plain["wire_bytes_a_step"]
        more = list(more_than(plain, contender).values()) if contender is not plain else []
        lines.append(f"| {contender['label']} | {f'{of_plain / wire:.3g}' if wire and of_plain else ''} | {losses} | "
                     + ", ".join(f"{100 * each:.1f} %" for each in more)
                     + f" | {f'{100 * statistics.mean(more):.1f} %' if more else ''} |")
    return "\n".join([*lines, "", f"![training loss by step]({stem}.svg)", ""])


def curve(losses):
    return [statistics.mean(losses[step - WINDOW:step]) for step in range(FIRST, len(losses) + 1)]


def picture(data, title):
    """Draws training losses by step. Each point is a mean over the last steps and over seeds."""
    series = [{"label": contender["label"],
               "points": [(FIRST + at, statistics.mean(of_seeds))
                          for at, of_seeds in enumerate(zip(*(curve(run["losses"]) for run in contender["runs"])))]}
              for contender in data["contenders"]]
    y_label = f"training loss of one replica, mean of {WINDOW} steps and of the seeds"
    return plots.svg(plots.curves(series, "step", y_label, (1, 4)), title, inline=False)


def main():
    options = parse_arguments()
    path = options.out / f"{options.stem}.json.xz"
    data = results.read(path) if options.redraw else results.write(path, measured(options))
    path.with_name(f"{options.stem}.md").write_text(page(data, options.title, options.stem))
    path.with_name(f"{options.stem}.svg").write_text(picture(data, options.title))


if __name__ == "__main__":
    main()
