"""Starts a contender's ranks on a workload, and reads their measurements. It uses the standard library only.

All ranks of all contenders are started in the same way: one process per rank, with torchrun's variables. Each rank
writes a metrics file, or rank 0 writes one for all ranks. The writers are `tessera train --metrics`, and peers/step.py
in the same form.
"""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import subprocess

import ranks
from contenders import strategy_file
from memory import PeakSampler, used_bytes
from works import write_tokens

FOLDER = pathlib.Path(__file__).resolve().parent
TIMEOUT_S = 600


@dataclasses.dataclass
class Run:
    """One run of a contender. Each list has one entry for each rank that reported. The losses are each rank's own
    losses, or the global losses."""

    samples_s: list                 # [[seconds of a timed step]]
    losses: list                    # [[loss of a step, from the first]]
    # These are other reported numbers. Tessera's first rank reports "allocated_bytes", "planned_bytes", and the
    # "exposed_s" of its timed steps. PyTorch reports the "allocated_peak_bytes" of its tensors on a GPU.
    facts: dict
    peak_bytes: float = None        # peak as memory.py measures it, mean over the ranks; only if asked for, and then nothing is timed

    def all_samples_s(self):
        return [sample for rank in self.samples_s for sample in rank]


def built_package(binary):
    """Returns {"PYTHONPATH": ...} for the Python package of the build of `binary`. It is {} if that build has no
    package, so that an installed package is found."""
    folder = pathlib.Path(binary).resolve().parents[1] / "python"
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} if (folder / "tessera").is_dir() else {}


def has_package(python, binary):
    """Returns whether `python` can import `tessera`."""
    return subprocess.run([python, "-c", "import tessera"], capture_output=True,
                          env=os.environ | built_package(binary)).returncode == 0


class Launcher:
    """Starts contenders. `pythons`: {family: interpreter}; `device`: "cpu", or "cuda" for contenders of a GPU."""

    def __init__(self, binary, pythons, device="cpu"):
        self.binary = binary
        self.pythons = pythons
        self.device = device

    def train(self, contender, work, folder, count=1, limit_s=TIMEOUT_S, steps=None, memory=False, more=(), watch=None):
        """Trains a contender. `steps`: if given, only this many steps are made, and none of them is timed. `more`:
        further arguments of the command. `watch`: as in ranks.run_ranks. Raises ranks.ContenderFailed if the contender
        fails or does not end in time."""
        for old in folder.glob("metrics.*"):
            old.unlink()
        sampler = None

        def watch_memory(pids):
            nonlocal sampler
            sampler = PeakSampler(lambda: _mean_used_bytes(pids))
            return sampler

        outside = memory and contender.family == "tessera"  # other frameworks sample their own memory while they train
        more = ["--memory"] if memory and not outside else more
        self.start(contender, [*self.command(contender, work, folder, steps), *more], folder, count, limit_s,
                   watch_memory if outside else watch)
        run = read(folder, work, steps)
        run.peak_bytes = sampler.peak if outside else run.peak_bytes
        return run

    def start(self, contender, command, folder, count, limit_s, watch=None):
        """Starts the ranks and returns when all have ended. They write their files into `folder`."""
        ranks.run_ranks(command, self.environments(contender, count), limit_s, watch)

    def strategy(self, contender, work):
        """Returns the strategy with which `tessera train` runs the contender."""
        return strategy_file(contender, work, self.device)

    def command(self, contender, work, folder, steps=None):
        """Returns the command. `steps`: the number of steps that Tessera makes, if it differs from the workload's
        number."""
        model, tokens = folder / "model.json", folder / "tokens.bin"
        model.write_text(json.dumps(work.model))
        if not tokens.exists():
            write_tokens(tokens, work.model["vocab_size"])
        common = ["--model", model, "--metrics", folder / "metrics.{rank}.jsonl", "--batch", work.batch // contender.ranks]
        if contender.family == "tessera":
            (folder / "strategy.json").write_text(json.dumps(self.strategy(contender, work)))
            count = steps or work.warm_up + work.steps + work.cool_down
            return [self.binary, "train", "--strategy", folder / "strategy.json", "--data", tokens, "--data-format", "llmc",
                    "--steps", count, "--log-every", count, *common]
        return [self.pythons[contender.family], FOLDER / "peers/step.py", "--contender", contender.argument,
                "--device", self.device, "--dtype", work.dtype, "--reduce", work.reduce, "--tokens", tokens,
                "--warm-up", work.warm_up, "--steps", work.steps, "--cool-down", work.cool_down, *common]

    def environments(self, contender, count):
        """Returns the environment of each rank. DeepSpeed finds the operators that benchmarks/setup compiled. Python
        writes no bytecode files into the folders of the sources. If ranks of Tessera train alone, they get no variables
        about other ranks, so each of them is a job with one rank. On a GPU some contenders draw the weights on the CPU,
        so all ranks together may use all cores."""
        threads = max(1, len(os.sched_getaffinity(0)) // count) if self.device == "cuda" else 1
        own = {"TORCH_EXTENSIONS_DIR": str(FOLDER / ".venv/extensions"), "PYTHONDONTWRITEBYTECODE": "1",
               "OMP_NUM_THREADS": str(threads)} | built_package(self.binary)
        strangers = contender.alone and contender.family == "tessera"
        return [of_rank | own for of_rank in ([{}] * count if strangers else ranks.rank_environments(count))]

    def peer_lines(self, program, arguments, python, count=1, limit_s=TIMEOUT_S, watch=None):
        """Runs another program of peers/ on `count` ranks. Returns the JSON line that each rank prints."""
        environments = [of_rank | {"TORCH_EXTENSIONS_DIR": str(FOLDER / ".venv/extensions"), "PYTHONDONTWRITEBYTECODE": "1"}
                        for of_rank in ranks.rank_environments(count)]
        return [json.loads(text) for text in
                ranks.run_ranks([python, FOLDER / "peers" / program, *arguments], environments, limit_s, watch)]

    def measure_memory(self, contender, work, folder, count):
        """Returns {"baseline_bytes", "peak_bytes"} of a rank, and the numbers of Tessera's plan. The baseline is the
        memory of the same contender with a tiny model: libraries, interpreter, threads, and everything else that does
        not grow with the model."""
        tiny = dataclasses.replace(work, model=work.model | {"layers": 1, "width": 8, "heads": 1})
        baseline = self.train(contender, tiny, folder, count, memory=True).peak_bytes
        run = self.train(contender, work, folder, count, memory=True)
        planned = {name: run.facts[name] for name in ("allocated_bytes", "planned_bytes") if name in run.facts}
        return {"baseline_bytes": baseline, "peak_bytes": run.peak_bytes} | planned


def metrics(path):
    """Returns the objects of a metrics file. If the run was ended while it wrote a line, that line is left out."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def steps_of(path):
    """Returns the objects of steps, without the header and the evaluations."""
    return [line for line in metrics(path) if "step" in line]


def read(folder, work, steps=None):
    """Returns the Run that left its metrics in `folder`. Raises ContenderFailed if no rank left metrics. Raises it too
    if a rank's metrics have another number of parameters or steps, or a loss that is not finite."""
    files = sorted(folder.glob("metrics.*.jsonl"))
    if not files:
        raise ranks.ContenderFailed("it left no metrics")
    reports = [steps_of(file) for file in files]
    wanted = steps or work.warm_up + work.steps + work.cool_down
    for file, report in zip(files, reports):
        parameters = next((line["parameters"] for line in metrics(file) if "parameters" in line), 0)
        if parameters != work.parameters():
            raise ranks.ContenderFailed(f"it trained {parameters} parameters instead of {work.parameters()}")
        if len(report) != wanted:
            raise ranks.ContenderFailed(f"it trained {len(report)} steps instead of {wanted}")
        if not all(isinstance(line["loss"], float) and math.isfinite(line["loss"]) for line in report):
            raise ranks.ContenderFailed(f"its losses are {[line['loss'] for line in report]}")
    ends = [line for file in files for line in metrics(file) if line.get("event") == "end"]
    first, last = (0, 0) if steps else (work.warm_up, work.warm_up + work.steps)
    timed = [report[first:last] for report in reports]
    facts = {name: end for name, end in (ends[0] if ends else {}).items() if name == "allocated_peak_bytes"}
    if "bytes_planned" in reports[0][-1]:
        facts |= {"allocated_bytes": reports[0][-1]["bytes_allocated"], "planned_bytes": reports[0][-1]["bytes_planned"],
                  "exposed_s": [line["communication_seconds"] for line in timed[0]]}
    peaks = [end["peak_bytes"] for end in ends if "peak_bytes" in end]
    return Run([[line["seconds"] for line in rank] for rank in timed], [[line["loss"] for line in rank] for rank in reports], facts,
               sum(peaks) / len(peaks) if peaks else None)


def _mean_used_bytes(pids):
    """Returns the mean of used_bytes over the processes. Returns None if one of them has ended."""
    with contextlib.suppress(OSError):
        return sum(used_bytes(pid) for pid in pids) / len(pids)
    return None
