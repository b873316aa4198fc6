"""Who is compared on a GPU: how each is started, and how what it says is read. Standard library only.

A process a rank, with torchrun's variables. Most contenders are one rank; "shared" ones are several on the one GPU.
"""

import contextlib
import dataclasses
import json
import os
import pathlib

import ranks
from contenders import ADAMW, read_metrics
from memory import PeakSampler

PEERS = pathlib.Path(__file__).resolve().parent / "peers"
MEMORY_SAMPLE_SECONDS = 0.1  # allocators keep what they took, so that a sample now and then sees the peak


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    family: str      # "torch", "tessera", "shared", or "rules"
    label: str
    argument: str    # to peers/train_step.py, or Tessera's strategy
    ranks: int = 1
    transport: str = "nccl"     # Tessera's
    host_step: str = ""         # of Tessera with masters and moments in the host's memory: who updates them, "gpu" or "cpu"
    in_backward: bool = False   # units are updated while backward goes on
    host_all: bool = False      # parameters and gradients lie there, too, as with FSDP2's CPUOffloadPolicy
    rule: str = "adamw"         # Tessera's optimizer.type


def _shared(strategy, ranks):
    return Contender(f"shared_{strategy.lower()}_{ranks}", "shared",
                     f"Tessera {strategy}, {ranks} rank{'s' if ranks > 1 else ''}", strategy, ranks, "cuda_host")


def _rule(name):
    return Contender(f"rule_{name}", "rules", f"Tessera FULL_SHARD, {name}", "FULL_SHARD", rule=name)


# Of Tessera's other rules, whose rates are such that training goes on.
RULES = {"lamb": {"type": "lamb", "lr": 1e-3, "weight_decay": 0.01},
         "lars": {"type": "lars", "lr": 0.1, "weight_decay": 0.01, "momentum": 0.9},
         "muon": {"type": "muon", "lr": 3e-4, "weight_decay": 0.01},
         "muon_bf16": {"type": "muon", "lr": 3e-4, "weight_decay": 0.01, "muon": {"ns_dtype": "bf16"}},
         "adafactor": {"type": "adafactor", "lr": 1e-2, "weight_decay": 0.01}}

CONTENDERS = {contender.name: contender for contender in (
    Contender("torch_eager", "torch", "PyTorch, plain module", "eager"),
    Contender("torch_ddp", "torch", "PyTorch DDP", "ddp"),
    Contender("torch_fsdp2", "torch", "PyTorch FSDP2", "fsdp2"),
    Contender("tessera_no_shard", "tessera", "Tessera NO_SHARD", "NO_SHARD"),
    Contender("tessera_shard_gradients", "tessera", "Tessera SHARD_GRADIENTS", "SHARD_GRADIENTS"),
    Contender("tessera_full_shard", "tessera", "Tessera FULL_SHARD", "FULL_SHARD"),
    Contender("torch_fsdp2_host", "torch", "PyTorch FSDP2, CPUOffloadPolicy", "fsdp2_host"),
    Contender("tessera_host_gpu", "tessera", "Tessera FULL_SHARD, states on the host, updated by the GPU", "FULL_SHARD",
              host_step="gpu"),
    Contender("tessera_host_cpu", "tessera", "Tessera FULL_SHARD, states on the host, updated by the CPU", "FULL_SHARD",
              host_step="cpu"),
    Contender("tessera_host_backward", "tessera", "Tessera FULL_SHARD, states on the host, updated by the GPU in backward",
              "FULL_SHARD", host_step="gpu", in_backward=True),
    Contender("tessera_host_all", "tessera", "Tessera FULL_SHARD, all on the host, updated by the CPU", "FULL_SHARD",
              host_step="cpu", host_all=True),
    *(_rule(name) for name in ("adamw", *RULES)),
    *(_shared(strategy, ranks) for strategy in ("NO_SHARD", "SHARD_GRADIENTS", "FULL_SHARD") for ranks in (1, 2, 4)),
)}


def strategy_file(contender, device):
    """bf16 parameters and fp32 masters; gradients are reduced in fp32, as FSDP2's are."""
    strategy = {"strategy": contender.argument, "units": {"classes": ["Block"]},
                "optimizer": RULES.get(contender.rule, ADAMW),
                "mixed_precision": {"param": "bf16", "reduce": "fp32"},
                "comm": {"transport": contender.transport if device == "cuda" else "auto"}}
    if contender.host_step:
        strategy["offload"] = {"masters": {"tier": "host"}, "moments": {"tier": "host"}, "step": contender.host_step}
    if contender.in_backward:
        # A quarter of a GiB of records on their way each way, so that the bus need not wait for a unit's backward.
        strategy["optimizer"] = ADAMW | {"in_backward": True}
        strategy["offload"] |= {"record": "4MiB", "queue_depth": 32}
    if contender.host_all:
        strategy["offload"] |= {"parameters": {"tier": "host"}, "gradients": {"tier": "host"}}
    return strategy


def environments(count=1):
    """Of the ranks. The weights are drawn on the CPU by some contenders, so they have all cores between them."""
    own = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)), "PYTHONDONTWRITEBYTECODE": "1"}
    return [of_rank | own for of_rank in ranks.rank_environments(count)]


class Runner:
    """`used_bytes`: a function that says how much memory of the GPU is in use, or None where there is none."""

    def __init__(self, python, binary, device, used_bytes):
        self.python = python
        self.binary = binary
        self.device = device
        self._used_bytes = used_bytes

    def peer(self, program, arguments, limit_s, watch=None):
        """The JSON line that a program of peers/ prints."""
        command = [self.python, PEERS / program, "--device", self.device, *arguments]
        text, = ranks.run_ranks(command, environments(), limit_s, watch)
        return json.loads(text)

    def train(self, contender, work, folder, limit_s):
        """{"samples_s", "losses", "device_bytes"}: seconds of the timed steps, loss of every step, and peak memory
        above what the GPU had in use before (None without a GPU); torch adds "allocated_peak_bytes", of the timed steps
        by its own count, Tessera "allocated_bytes" and "planned_bytes", of its first rank, and "exposed_s", of the timed
        steps: seconds in which the GPU's computation waited for collectives."""
        (folder / "model.json").write_text(json.dumps(work.model))
        run = self._peer_step if contender.family == "torch" else self._tessera
        if self._used_bytes is None:
            return run(contender, work, folder, limit_s, None) | {"device_bytes": None}
        before = self._used_bytes()
        sampler = PeakSampler(self._used_bytes, MEMORY_SAMPLE_SECONDS)
        measured = run(contender, work, folder, limit_s, lambda pids: sampler)
        return measured | {"device_bytes": sampler.peak - before}

    def _peer_step(self, contender, work, folder, limit_s, watch):
        line = self.peer("train_step.py", [
            "--contender", contender.argument, "--model", folder / "model.json", "--tokens", folder / "tokens.bin",
            "--batch", work.batch, "--warm-up", work.warm_up, "--steps", work.steps], limit_s, watch)
        return {name: line[name] for name in ("samples_s", "losses", "allocated_peak_bytes")}

    def _tessera(self, contender, work, folder, limit_s, watch):
        metrics, strategy = folder / "metrics.jsonl", folder / "strategy.json"
        with contextlib.suppress(FileNotFoundError):
            metrics.unlink()
        strategy.write_text(json.dumps(strategy_file(contender, self.device)))
        steps = work.warm_up + work.steps
        command = [self.binary, "train", "--model", folder / "model.json", "--strategy", strategy,
                   "--data", folder / "tokens.bin", "--data-format", "llmc", "--batch", work.batch // contender.ranks, "--steps", steps,
                   "--log-every", steps, "--metrics", metrics]
        ranks.run_ranks(command, environments(contender.ranks), limit_s, watch)
        lines = read_metrics(metrics)
        return {"samples_s": [line["seconds"] for line in lines[work.warm_up:]],
                "losses": [line["loss"] for line in lines],
                "exposed_s": [line["communication_seconds"] for line in lines[work.warm_up:]],
                "allocated_bytes": lines[-1]["bytes_allocated"], "planned_bytes": lines[-1]["bytes_planned"]}
