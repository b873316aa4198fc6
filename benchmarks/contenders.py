"""The contenders of the comparison. Each has a row with its family, how it is started, and where it is measured. This
module uses the standard library only.

A contender of PyTorch, DeepSpeed or the Python package is named by an argument of peers/step.py, and a contender of
Tessera by a strategy.
"""

import dataclasses

ADAMW = {"type": "adamw", "lr": 3e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01}
# This table has the ZeRO stage of each contender. The stage's formula gives the contender's memory
# (memory.formula_bytes).
_STAGES = {"SHARD_OPTIMIZER": 1, "zero1": 1, "SHARD_GRADIENTS": 2, "SHARD_GRAD_OP": 2, "fsdp2_no_reshard": 2, "zero2": 2,
           "FULL_SHARD": 3, "full_shard": 3, "full_shard_private": 3, "fsdp2": 3, "zero3": 3}


@dataclasses.dataclass(frozen=True)
class Contender:
    name: str
    family: str                     # "torch", "deepspeed", "tessera", or "python": Tessera's package on a PyTorch model
    label: str
    argument: str                   # argument of peers/step.py, or Tessera's strategy
    where: tuple                    # places where it is timed: "host", "net", "gpu", "python" (host, all in Python)
    group: str                      # group of comparison; "alone": no communication; "compressed": inexact gradients
    more: dict = dataclasses.field(default_factory=dict)  # keys of Tessera's strategy in addition to its name
    ranks_per_host: int = 1         # least number of ranks on a host; hosts with fewer ranks leave the contender out
    ranks: int = 1                  # ranks on one GPU; they divide its batch among them

    @property
    def alone(self):
        return self.group == "alone"

    @property
    def stage(self):
        return _STAGES.get(self.argument, 0)

    @property
    def private_copies(self):
        """Returns whether Tessera's ranks share no parameters. They then gather as ranks on several hosts do."""
        return self.more.get("host_sharing") is False

    @property
    def predicted(self):
        """Returns whether `tessera plan` predicts this contender's steps. It does not predict the time of the
        computation that compression methods need."""
        forms = self.more.get("compression", {}).keys() <= {"gradients", "sums", "gathers"}
        return self.family == "tessera" and not self.alone and forms

    def facts(self):
        """Returns the fields of this contender in the results."""
        return {"name": self.name, "family": self.family, "label": self.label, "group": self.group, "stage": self.stage,
                "private_copies": self.private_copies}


_ALL = ("host", "python", "net")
_HOST, _PYTHON, _NET, _GPU = ("host",), ("python",), ("net",), ("gpu",)
_HEAD_UNIT = {"classes": ["Block"], "modules": ["head"]}
_STATES_ON_HOST = {"masters": {"tier": "host"}, "moments": {"tier": "host"}}
_ALL_ON_HOST = _STATES_ON_HOST | {"parameters": {"tier": "host"}, "gradients": {"tier": "host"}}
_IN_BACKWARD = {"optimizer": ADAMW | {"in_backward": True}}
# These are Tessera's rules on a GPU, with learning rates with which training does not diverge.
_RULES = {"adamw": ADAMW,
          "lamb": {"type": "lamb", "lr": 1e-3, "weight_decay": 0.01},
          "adafactor": {"type": "adafactor", "lr": 1e-2, "weight_decay": 0.01},
          "muon": {"type": "muon", "lr": 3e-4, "weight_decay": 0.01},
          "muon_bf16": {"type": "muon", "lr": 3e-4, "weight_decay": 0.01, "muon": {"ns_dtype": "bf16"}},
          "lars": {"type": "lars", "lr": 0.1, "weight_decay": 0.01, "momentum": 0.9}}


def _torch(name, label, argument, where, group):
    return Contender(f"torch_{name}", "torch", f"PyTorch{label}", argument, where, group)


def _zero(stage, where, group):
    return Contender(f"deepspeed_zero{stage}", "deepspeed", f"DeepSpeed ZeRO-{stage}", f"zero{stage}", where, group)


def _python(argument, label, where):
    return Contender(f"python_{argument}", "python", f"Tessera in Python, {label}", argument, where, "python")


def _tessera(name, strategy, where, group, label="", **more):
    return Contender(f"tessera_{name}", "tessera", f"Tessera {strategy}{label}", strategy, where, group, more)


def _private(strategy):
    return _tessera(f"{strategy.lower()}_private", strategy, _HOST, "private", ", private copies", host_sharing=False)


def _shared(strategy, ranks):
    return Contender(f"shared_{strategy.lower()}_{ranks}", "tessera", f"Tessera {strategy}, {ranks} rank{'s' * (ranks > 1)}",
                     strategy, _GPU, "shared", {"comm": {"transport": "cuda_host"}}, ranks=ranks)


CONTENDERS = {contender.name: contender for contender in (
    _torch("alone", ", no communication", "alone", _ALL, "alone"),
    Contender("tessera_alone", "tessera", "Tessera, no communication", "NO_SHARD", ("host", "net"), "alone"),
    _torch("eager", ", plain module", "eager", _GPU, "replicated"),
    _torch("ddp", " DDP", "ddp", (*_ALL, "gpu"), "replicated"),
    _tessera("no_shard", "NO_SHARD", ("host", "net", "gpu"), "replicated"),
    _tessera("buckets", "NO_SHARD", _NET, "replicated", ", buckets of 8 MiB", units={"bucket_cap_mb": 8}),
    _tessera("lossless", "NO_SHARD", _NET, "replicated", ", lossless",
             compression={"gradients": "lossless", "sums": "lossless"}),
    _tessera("in_backward", "NO_SHARD", _NET, "replicated", ", buckets of 8 MiB, updated in backward",
             units={"bucket_cap_mb": 8}, reductions_ahead=15, **_IN_BACKWARD),
    _zero(1, _HOST, "replicated"),
    _tessera("shard_optimizer", "SHARD_OPTIMIZER", _HOST, "replicated"),
    _zero(2, ("host", "net"), "replicated"),
    _tessera("shard_gradients", "SHARD_GRADIENTS", ("host", "net", "gpu"), "replicated"),
    _torch("fsdp2_no_reshard", " FSDP2, no reshard", "fsdp2_no_reshard", ("host", "net"), "sharded"),
    _tessera("shard_grad_op", "SHARD_GRAD_OP", ("host", "net"), "sharded"),
    _torch("fsdp2", " FSDP2", "fsdp2", (*_ALL, "gpu"), "sharded"),
    _zero(3, _ALL, "sharded"),
    _tessera("full_shard", "FULL_SHARD", ("host", "net", "gpu"), "sharded"),
    *map(_private, ("SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD")),
    _tessera("full_head", "FULL_SHARD", _NET, "sharded", ", the head a unit", units=_HEAD_UNIT),
    _tessera("full_lossless", "FULL_SHARD", _NET, "sharded", ", the head a unit, lossless", units=_HEAD_UNIT,
             compression={"gradients": "lossless", "gathers": "lossless"}),
    Contender("tessera_hybrid_shard", "tessera", "Tessera HYBRID_SHARD", "HYBRID_SHARD", _NET, "sharded", ranks_per_host=2),
    _python("no_shard", "NO_SHARD", ("python", "net")),
    _python("full_shard", "FULL_SHARD", ("python", "net")),
    _python("full_shard_private", "FULL_SHARD, private copies", _PYTHON),
    _torch("ddp_fp16", " DDP, fp16 hook", "ddp_fp16", _NET, "compressed"),
    _torch("ddp_power_sgd", " DDP, PowerSGD hook", "ddp_power_sgd", _NET, "compressed"),
    _tessera("int8", "NO_SHARD", _NET, "compressed", ", int8", compression={"gradients": "int8", "sums": "int8"}),
    _tessera("top_k", "NO_SHARD", _NET, "compressed", ", top 1 %", compression={"method": {"type": "top_k", "fraction": 0.01}}),
    _tessera("full_int8", "FULL_SHARD", _NET, "compressed", ", int8 both ways",
             compression={"gradients": "int8", "gathers": "int8"}),
    _tessera("power_sgd", "NO_SHARD", _NET, "compressed", ", PowerSGD", compression={"method": {"type": "power_sgd", "rank": 4}}),
    _torch("fsdp2_host", " FSDP2, CPUOffloadPolicy", "fsdp2_host", _GPU, "sharded"),
    _tessera("host_gpu", "FULL_SHARD", _GPU, "sharded", ", states on the host, updated by the GPU",
             offload=_STATES_ON_HOST | {"step": "gpu"}),
    _tessera("host_cpu", "FULL_SHARD", _GPU, "sharded", ", states on the host, updated by the CPU",
             offload=_STATES_ON_HOST | {"step": "cpu"}),
    # Up to 32 records of 4 MiB are under way in each direction, so that the bus never waits for a unit's backward.
    _tessera("host_backward", "FULL_SHARD", _GPU, "sharded", ", states on the host, updated by the GPU in backward",
             offload=_STATES_ON_HOST | {"step": "gpu", "record": "4MiB", "queue_depth": 32}, **_IN_BACKWARD),
    # FSDP2's CPUOffloadPolicy, too, stores all state on the host.
    _tessera("host_all", "FULL_SHARD", _GPU, "sharded", ", all on the host, updated by the CPU",
             offload=_ALL_ON_HOST | {"step": "cpu"}),
    *(Contender(f"rule_{name}", "tessera", f"Tessera FULL_SHARD, {name}", "FULL_SHARD", _GPU, "rules", {"optimizer": rule})
      for name, rule in _RULES.items()),
    *(_shared(strategy, ranks) for ranks in (1, 2, 4) for strategy in ("FULL_SHARD", "SHARD_GRADIENTS", "NO_SHARD")),
)}


def named(names):
    return [CONTENDERS[name] for name in names]


def those_of(where):
    """Returns the names of the contenders that run at `where`, in the order of the list."""
    return tuple(name for name, contender in CONTENDERS.items() if where in contender.where)


def strategy_file(contender, work, device="cpu"):
    """Returns the strategy for `tessera train`. Masters are fp32 if parameters are bf16, as in FSDP2."""
    strategy = {"strategy": contender.argument, "units": {"classes": ["Block"]}, "optimizer": ADAMW}
    if work.dtype == "bf16":
        strategy["mixed_precision"] = {"param": "bf16", "reduce": work.reduce}
    if device == "cuda":
        strategy["comm"] = {"transport": "nccl"}
    strategy |= contender.more
    if device == "cpu":
        strategy.pop("comm", None)  # a smoke test runs a GPU's contender on the CPU, with the default transport
    return strategy
