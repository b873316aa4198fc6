#!/usr/bin/env python3
"""Times steps of PyTorch, DeepSpeed and Tessera's Python package on one PyTorch model, with one process per rank.

    alone               one rank that communicates with nobody; in bf16 without masters, the least work there is
    eager               alone with fp32 masters if parameters are bf16, as users store masters by hand
    ddp                 eager in DistributedDataParallel
    ddp_fp16            ddp with PyTorch's hook that sends gradients in fp16
    ddp_power_sgd       ddp with PyTorch's hook for PowerSGD of rank 4
    fsdp2               fully_shard for each block, and the rest as the root; fp32 shards if parameters are bf16
    fsdp2_no_reshard    fsdp2 with parameters that stay gathered from forward to backward
    fsdp2_host          fsdp2 with CPUOffloadPolicy: shards, gradients and moments are in the host's memory
    zero1, zero2, zero3
                        DeepSpeed's stages over Gloo, with its own CPU Adam; they need DS_ACCELERATOR=cpu, and also
                        `ninja` and `g++` if the operator has not been compiled (benchmarks/setup compiles it)
    no_shard, full_shard, full_shard_private
                        Tessera's package, which must be importable: built (launch.py puts the build's folder on the
                        path) or installed with pip; private: each rank has its own copy of the parameters, so that
                        units are gathered

Every contender has fused AdamW, the same weights and the same samples. If the model file says "recompute", all
contenders compute blocks again in backward. Nothing is compiled (torch.compile): Tessera runs modules as they are, too.

Each rank writes a metrics file in the form of `tessera train --metrics`. The file has a header {"event": "start",
"parameters"}, and a line {"step", "loss", "seconds"} per step (on the CPU, it is written as soon as the step ends). The
last line is {"event": "end", "peak_bytes"?, "allocated_peak_bytes"?}. step: from 1. seconds: the time since the end of
the previous step; for the first step, and on the CPU for the first timed step, the time since the step's own beginning.
peak_bytes: as benchmarks/memory.py measures it over the timed steps, only with --memory. allocated_peak_bytes: the peak
of tensors in the timed steps, on a GPU.
"""

import argparse
import contextlib
import json
import os
import pathlib

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import ADAMW, Batches, Ranks, new_model  # noqa: E402
from memory import PeakSampler  # noqa: E402  (common says where it is)
from on_device import Device  # noqa: E402

POWER_SGD_RANK = 4
POWER_SGD_START = 2  # the earliest step at which PyTorch's hook may start PowerSGD with a warm start
ONE_BUCKET_MB = 1 << 14  # this makes one bucket: with several, the hook loses its state in every step over Gloo
DDP = ("ddp", "ddp_fp16", "ddp_power_sgd")
ZERO = ("zero1", "zero2", "zero3")
TESSERA = {"no_shard": {"strategy": "NO_SHARD"}, "full_shard": {"strategy": "FULL_SHARD"},
           "full_shard_private": {"strategy": "FULL_SHARD", "host_sharing": False}}
CONTENDERS = ("alone", "eager", *DDP, "fsdp2", "fsdp2_no_reshard", "fsdp2_host", *ZERO, *TESSERA)


def recompute_blocks(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)  # not needed without dropout


def sharded(model, options, ranks):
    """Applies FSDP2 to each block, and to the rest as the root."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    arguments = {"mesh": init_device_mesh(options.device, (ranks.count,))}
    if options.dtype == "bf16":
        reduce = torch.bfloat16 if options.reduce == "bf16" else torch.float32
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    if options.contender == "fsdp2_host":
        arguments["offload_policy"] = CPUOffloadPolicy()
    reshard = {"reshard_after_forward": options.contender != "fsdp2_no_reshard"}
    for unit in model.units():
        fully_shard(unit, **arguments, **reshard)
    # On the CPU, the root is gathered again in backward, as it was when all earlier results were measured.
    fully_shard(model, **arguments, **(reshard if options.device == "cpu" else {}))
    return model


def with_ddp(model, contender):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    buckets = {"bucket_cap_mb": ONE_BUCKET_MB} if contender == "ddp_power_sgd" else {}
    # Without gradient_as_bucket_view each gradient would exist twice.
    module = DistributedDataParallel(model, gradient_as_bucket_view=True, **buckets)
    if contender == "ddp_fp16":
        module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif contender == "ddp_power_sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=POWER_SGD_RANK,
                                            start_powerSGD_iter=POWER_SGD_START)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return module


class Trainer:
    """PyTorch's forward, backward and update. The form of the update depends on which object holds the fp32 values."""

    def __init__(self, model, options, ranks):
        contender, self.masters = options.contender, []
        self.keeps_gradients = options.device == "cuda"
        if contender.startswith("fsdp2"):
            self.module = sharded(model, options, ranks)
        else:
            if options.dtype == "bf16" and contender != "alone":
                self.masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
            model = model.bfloat16() if options.dtype == "bf16" else model
            self.module = with_ddp(model, contender) if contender in DDP else model
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, fused=True, **ADAMW)

    def __call__(self, tokens, targets):
        loss = self.module(tokens, targets)
        loss.backward()
        self._update()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    @torch.no_grad()
    def _update(self):
        # All tensors are updated with a few launches. One launch for each tensor would take longer on a GPU than Adam's
        # computation.
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.empty_like(master)
        if self.masters:
            torch._foreach_copy_([master.grad for master in self.masters], [parameter.grad for parameter in self.parameters])
        self.optimizer.step()
        if self.masters:
            torch._foreach_copy_(self.parameters, self.masters)
        if not self.keeps_gradients:
            for master in self.masters:
                master.grad = None


def deepspeed_step(model, options):
    """Returns DeepSpeed's step with its default settings, except for the size of buckets. The default of 5e8 elements
    is 2 GB, more than these models have."""
    import deepspeed
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    bucket = min(sum(parameter.numel() for parameter in model.parameters()), int(5e8))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_optimization": {"stage": int(options.contender[-1]), "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "zero_allow_untested_optimizer": False,
    }
    optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine_step(engine, engine)


def tessera_step(model, options):
    import tessera
    strategy = {"units": {"classes": ["Block"]}, "optimizer": {"type": "adamw", **ADAMW}}
    return engine_step(tessera.Engine(model, strategy | TESSERA[options.contender]), model)


def engine_step(engine, forward):
    """Returns a function that makes a step: forward, the engine's backward and the engine's update."""
    def step(tokens, targets):
        loss = forward(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def join(options, ranks, device):
    """Returns a function that is a barrier of all ranks. Tessera's ranks find each other when they ask for an Engine.
    The contender "eager" joins no group, since a group would take memory of a GPU. On a GPU the function does nothing,
    since a barrier would have to wait for the GPU."""
    if options.contender in TESSERA:
        if options.dtype != "fp32":
            raise SystemExit(f"step: --dtype {options.dtype} is not one of {options.contender}'s; it trains in fp32")
        import tessera
        return tessera.barrier
    if options.contender == "eager":
        return lambda: None
    if options.contender in ZERO:
        import deepspeed
        deepspeed.init_distributed(dist_backend="gloo")
    else:
        if options.device == "cuda":
            torch.cuda.set_device(0)
        ranks.join(device.backend)
    return (lambda: None) if device.on_gpu else dist.barrier


def new_step(options, ranks):
    """Returns (number of parameters, a function of the contender). The function trains one step on (tokens, targets)
    and returns the loss."""
    config = json.loads(pathlib.Path(options.model).read_text())
    with torch.device(options.device):
        model = new_model(config)
    if config.get("recompute"):
        recompute_blocks(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if options.contender in ZERO:
        return parameters, deepspeed_step(model, options)
    if options.contender in TESSERA:
        return parameters, tessera_step(model, options)
    return parameters, Trainer(model, options, ranks)


def batches_of(options, ranks):
    """Brings all batches to the device in advance, so that steps spend no time on reading."""
    batches = Batches(options.tokens, json.loads(pathlib.Path(options.model).read_text()), ranks, options.batch)
    return [[part.to(options.device) for part in batches.of_step(number)]
            for number in range(options.warm_up + options.steps + options.cool_down)]


def profiled(path):
    """Returns a context in which PyTorch's profiler runs, if there is a path for its Chrome trace."""
    if path is None:
        return contextlib.nullcontext()
    return torch.profiler.profile(on_trace_ready=lambda profiler: profiler.export_chrome_trace(path))


def run_steps(step, batches, options, device, meet, note):
    """The ranks call `meet` (a barrier) before the timed steps. Ranks that train alone are therefore timed at the same
    time too. The host is one step ahead of a GPU, as Tessera's host is: it queues the next step before it waits for the
    end of a step. Losses are read at the end."""
    sampler, timed, losses, ends = PeakSampler(), contextlib.ExitStack(), [], [device.mark()]
    for number, batch in enumerate(batches):
        if number == options.warm_up:
            meet()
            device.forget_peak()
            if options.memory:
                timed.enter_context(sampler)
            ends[-1] = device.mark() if not device.on_gpu else ends[-1]
        losses.append(step(*batch))
        ends.append(device.mark())
        if device.on_gpu:
            ends[-2].wait()
        else:
            note({"step": number + 1, "loss": losses[-1].item(), "seconds": ends[-1].seconds_since(ends[-2])})
        if number + 1 == options.warm_up + options.steps:
            timed.close()
    ends[-1].wait()
    if device.on_gpu:
        for number, (loss, before, end) in enumerate(zip(torch.stack(losses).tolist(), ends, ends[1:]), start=1):
            note({"step": number, "loss": loss, "seconds": end.seconds_since(before)})
    note({"event": "end", "allocated_peak_bytes": device.peak_bytes()} | ({"peak_bytes": sampler.peak} if options.memory else {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--model", required=True, help="model file (JSON)")
    parser.add_argument("--tokens", required=True, help="token file of llm.c, 16 bits a token")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of parameters")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="bf16", help="of FSDP2's gradients where --dtype is bf16")
    parser.add_argument("--batch", type=int, default=1, help="samples of a step of one rank")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the timed ones, 1 or more")
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--cool-down", type=int, default=0, help="steps after the timed ones")
    parser.add_argument("--metrics", required=True, help="file that this rank writes; {rank} in it becomes the rank")
    parser.add_argument("--memory", action="store_true", help="measure memory; steps are slower then")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace of all steps, which are slower then")
    options = parser.parse_args()
    ranks, device = Ranks(), Device(options.device)
    if not device.on_gpu:
        torch.set_num_threads(1)
    meet = join(options, ranks, device)
    parameters, step = new_step(options, ranks)
    batches = batches_of(options, ranks)
    with open(options.metrics.replace("{rank}", str(ranks.rank)), "w", buffering=1) as file, profiled(options.trace):
        note = lambda line: file.write(json.dumps(line) + "\n")  # noqa: E731
        note({"event": "start", "parameters": parameters})
        run_steps(step, batches, options, device, meet, note)
    if dist.is_initialized() and options.contender not in TESSERA:
        ranks.leave()
        # Gloo's worker threads belong to DDP's hooks, and sometimes abort a process while it ends.
        os._exit(0)


if __name__ == "__main__":
    main()
