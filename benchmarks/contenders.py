"""Who is compared: how each is started on a work, and how what it says is read. Standard library only.

All ranks of all contenders are started in the same way: one process a rank, one thread each, torchrun's variables
in the environment.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess

import ranks
from memory import PeakSampler, used_bytes

FOLDER = pathlib.Path(__file__).resolve().parent
RANKS = 2
TIMEOUT_S = 600
ADAMW = {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}


@dataclasses.dataclass
class Run:
    """One run of a contender. Lists hold one entry a rank that reported; losses are each rank's, or the global ones."""

    samples_s: list                 # [[seconds of a timed step]]
    losses: list                    # [[loss of a step, from the first]]
    peak_bytes: float = None        # memory.py's, mean over the ranks; only if asked for, and then nothing is timed
    planned: dict = None            # Tessera's "allocated_bytes", "planned_bytes" of one rank


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    family: str                     # "torch", "deepspeed", "tessera", or "python": Tessera's package on a PyTorch model
    label: str
    stage: int                      # whose formula its memory follows (memory.formula_bytes)
    argument: str                   # to the peer's program, or Tessera's strategy
    alone: bool = False             # no communication: the ranks are strangers that train at the same time
    private_copies: bool = False    # Tessera's ranks share no parameters, so they gather as ranks of several hosts do


CONTENDERS = [
    Contender("torch_alone", "torch", "PyTorch, no communication", 0, "alone", alone=True),
    Contender("torch_ddp", "torch", "PyTorch DDP", 0, "ddp"),
    Contender("torch_fsdp2_no_reshard", "torch", "PyTorch FSDP2, no reshard", 2, "fsdp2_no_reshard"),
    Contender("torch_fsdp2", "torch", "PyTorch FSDP2", 3, "fsdp2"),
    Contender("deepspeed_zero1", "deepspeed", "DeepSpeed ZeRO-1", 1, "zero1"),
    Contender("deepspeed_zero2", "deepspeed", "DeepSpeed ZeRO-2", 2, "zero2"),
    Contender("deepspeed_zero3", "deepspeed", "DeepSpeed ZeRO-3", 3, "zero3"),
    Contender("tessera_alone", "tessera", "Tessera, no communication", 0, "NO_SHARD", alone=True),
    Contender("tessera_no_shard", "tessera", "Tessera NO_SHARD", 0, "NO_SHARD"),
    Contender("tessera_shard_optimizer", "tessera", "Tessera SHARD_OPTIMIZER", 1, "SHARD_OPTIMIZER"),
    Contender("tessera_shard_gradients", "tessera", "Tessera SHARD_GRADIENTS", 2, "SHARD_GRADIENTS"),
    Contender("tessera_shard_grad_op", "tessera", "Tessera SHARD_GRAD_OP", 2, "SHARD_GRAD_OP"),
    Contender("tessera_full_shard", "tessera", "Tessera FULL_SHARD", 3, "FULL_SHARD"),
    *(Contender(f"tessera_{strategy.lower()}_private", "tessera", f"Tessera {strategy}, private copies", stage,
                strategy, private_copies=True)
      for strategy, stage in (("SHARD_OPTIMIZER", 1), ("SHARD_GRADIENTS", 2), ("SHARD_GRAD_OP", 2), ("FULL_SHARD", 3))),
]


# Who trains the one Python model of the section "python": peers of CONTENDERS, and Tessera's package.
PYTHON_PEERS = ("torch_alone", "torch_ddp", "torch_fsdp2", "deepspeed_zero3")
PYTHON_CONTENDERS = [
    *(contender for contender in CONTENDERS if contender.name in PYTHON_PEERS),
    Contender("tessera_python_no_shard", "python", "Tessera in Python, NO_SHARD", 0, "no_shard"),
    Contender("tessera_python_full_shard", "python", "Tessera in Python, FULL_SHARD", 3, "full_shard"),
    Contender("tessera_python_full_shard_private", "python", "Tessera in Python, FULL_SHARD, private copies", 3,
              "full_shard_private", private_copies=True),
]


class PeerRunner:
    """Runs torch_step.py, deepspeed_step.py and python_step.py; `environment` is theirs beside torchrun's."""

    def __init__(self, python, environment=None):
        self._python = python
        self._environment = environment or {}

    def run(self, contender, work, folder, measure_memory=False, count=RANKS):
        program = {"torch": "torch_step.py", "deepspeed": "deepspeed_step.py",
                   "python": "python_step.py"}[contender.family]
        (folder / "model.json").write_text(json.dumps(work.model))
        command = [self._python, FOLDER / "peers" / program, "--contender", contender.argument,
                   "--model", folder / "model.json", "--tokens", folder / "tokens.bin", "--dtype", work.dtype,
                   "--warm-up", work.warm_up, "--steps", work.steps, "--cool-down", work.cool_down]
        lines = peer_lines(command + (["--memory"] if measure_memory else []), count, self._environment)
        peak = sum(line["peak_bytes"] for line in lines) / len(lines) if measure_memory else None
        return Run([line["samples_s"] for line in lines], [line["loss"] for line in lines], peak)


def built_package(binary):
    """{"PYTHONPATH"} for the Python package of the build that `binary` is of; {} where that has none, so that an
    installed one is found."""
    folder = pathlib.Path(binary).resolve().parents[1] / "python"
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)} if (folder / "tessera").is_dir() else {}


def has_package(python, binary):
    """Whether `python` can import `tessera`."""
    return subprocess.run([python, "-c", "import tessera"], capture_output=True,
                          env=os.environ | built_package(binary)).returncode == 0


def peer_environments(count):
    """DeepSpeed finds the operators that benchmarks/setup compiled; nothing is written beside the sources."""
    own = {"TORCH_EXTENSIONS_DIR": str(FOLDER / ".venv" / "extensions"), "PYTHONDONTWRITEBYTECODE": "1"}
    return [environment | own for environment in ranks.rank_environments(count)]


def peer_lines(command, count, more=None):
    """Runs a program of peers/ on `count` ranks, with `more` in their environment; returns the JSON line of each."""
    environments = [environment | (more or {}) for environment in peer_environments(count)]
    return [json.loads(text) for text in ranks.run_ranks(command, environments, TIMEOUT_S)]


def strategy_file(contender, work):
    strategy = {"strategy": contender.argument, "units": {"classes": ["Block"]}, "optimizer": ADAMW}
    if work.dtype == "bf16":
        strategy["mixed_precision"] = {"param": "bf16", "reduce": "bf16"}
    if contender.private_copies:
        strategy["host_sharing"] = False
    return strategy


class TesseraRunner:
    """Runs `tessera train`. Ranks that are strangers write a metrics file each; else rank 0 writes one for all.

    Its memory is sampled from outside, from the start of the process to its end.
    """

    def __init__(self, binary):
        self._binary = binary

    def run(self, contender, work, folder, measure_memory=False, steps=None, count=RANKS):
        """`steps`: run only so many, and take no samples (for checks)."""
        if not measure_memory:
            return self._train(contender, work, folder, steps, count=count)
        sampler = None

        def watch(pids):
            nonlocal sampler
            sampler = PeakSampler(lambda: mean_used_bytes(pids))
            return sampler

        run = self._train(contender, work, folder, watch=watch)
        run.peak_bytes = sampler.peak
        return run

    def trace(self, contender, work, folder):
        """The Chrome trace of the last steps of a run."""
        file = folder / "trace.json"
        self._train(contender, work, folder, steps=work.warm_up + 1, more=["--trace", file, "--overwrite"])
        return json.loads(file.read_text())

    def _train(self, contender, work, folder, steps=None, watch=None, more=(), count=RANKS):
        all_steps = steps or work.warm_up + work.steps + work.cool_down
        files = [folder / f"metrics.{rank}.jsonl" for rank in range(count)]
        for file in files:
            file.unlink(missing_ok=True)
        (folder / "strategy.json").write_text(json.dumps(strategy_file(contender, work)))
        (folder / "model.json").write_text(json.dumps(work.model))
        command = [self._binary, "train", "--model", folder / "model.json", "--strategy", folder / "strategy.json",
                   "--data", folder / "tokens.bin", "--data-format", "llmc", "--batch", 1, "--steps", all_steps,
                   "--log-every", all_steps, "--metrics", folder / "metrics.{rank}.jsonl", *more]
        environments = [{} for _ in range(count)] if contender.alone else ranks.rank_environments(count)
        ranks.run_ranks(command, environments, TIMEOUT_S, watch)
        reports = [read_metrics(file) for file in files if file.exists()]
        first, last = (0, 0) if steps else (work.warm_up, work.warm_up + work.steps)
        return Run([[line["seconds"] for line in report[first:last]] for report in reports],
                   [[line["loss"] for line in report] for report in reports],
                   planned={"allocated_bytes": reports[0][-1]["bytes_allocated"],
                            "planned_bytes": reports[0][-1]["bytes_planned"]})


def measure_memory(runner, contender, work, folder):
    """{"baseline_bytes", "peak_bytes"} of a rank, and Tessera's plan. The baseline is what the same contender uses on a
    model of next to nothing: libraries, interpreter, threads, and whatever else does not grow with the model."""
    tiny = dataclasses.replace(work, model=work.model | {"layers": 1, "width": 8, "heads": 1})
    baseline = runner.run(contender, tiny, folder, measure_memory=True).peak_bytes
    run = runner.run(contender, work, folder, measure_memory=True)
    return {"baseline_bytes": baseline, "peak_bytes": run.peak_bytes} | (run.planned or {})


def read_metrics(path):
    """The objects of steps; a header and evaluations stand between them."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if "step" in line]


def mean_used_bytes(pids):
    """Mean over the processes; None once one of them has ended."""
    with contextlib.suppress(OSError):
        return sum(used_bytes(pid) for pid in pids) / len(pids)
    return None
