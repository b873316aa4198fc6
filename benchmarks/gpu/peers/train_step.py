#!/usr/bin/env python3
"""Training steps of PyTorch in bf16 with fp32 masters, one rank on one GPU.

    eager    the plain module: bf16 parameters, fp32 masters beside it, as users keep them by hand
    ddp      the same in DistributedDataParallel
    fsdp2    fully_shard a block, the rest as the root; fp32 shards, MixedPrecisionPolicy(bf16, reduced in fp32)
    fsdp2_host   the same with CPUOffloadPolicy: shards, gradients and moments in the host's memory, AdamW on its CPU

Everyone has fused AdamW, the same weights and tokens, and blocks that are computed again in backward where the model
file says "recompute". Nothing is compiled (torch.compile): Tessera runs modules as they are, too.

Prints one JSON line: {"samples_s": seconds from the end of a timed step to the end of the next, "losses": of every step
from the first, "allocated_peak_bytes": of tensors in the timed steps, null on the CPU}.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from on_device import Device
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from common import ADAMW, Batches, Ranks, new_model, read_model_config, standard_output  # on_device says where it is


def recompute_blocks(model):
    for number, block in enumerate(model.blocks):
        model.blocks[number] = checkpoint_wrapper(block, preserve_rng_state=False)  # there is no dropout


def shard(model, device, on_host):
    arguments = {"mesh": init_device_mesh(device.name, (1,)),
                 "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    if on_host:
        arguments["offload_policy"] = CPUOffloadPolicy()
    for unit in model.units():
        fully_shard(unit, reshard_after_forward=True, **arguments)
    fully_shard(model, **arguments)
    return model


class Trainer:
    """forward, backward and update; the update's form depends on who holds the fp32 values."""

    def __init__(self, config, contender, device):
        with torch.device(device.name):
            model = new_model(config)
        if config.get("recompute"):
            recompute_blocks(model)
        self.masters = []
        if contender in ("fsdp2", "fsdp2_host"):
            self.module = shard(model, device, contender == "fsdp2_host")
        else:
            self.masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
            self.module = model.bfloat16()
            if contender == "ddp":
                # Without gradient_as_bucket_view each gradient would exist twice.
                self.module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, fused=True, **ADAMW)

    def step(self, tokens, targets):
        loss = self.module(tokens, targets)
        loss.backward()
        self._update()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.detach()

    @torch.no_grad()
    def _update(self):
        # All tensors in a few launches: one launch a tensor would cost the plain module more than Adam does.
        if self.masters:
            torch._foreach_copy_([master.grad for master in self.masters],
                                 [parameter.grad for parameter in self.parameters])
        self.optimizer.step()
        if self.masters:
            torch._foreach_copy_(self.parameters, self.masters)


def batches_of(options, config, ranks, device):
    """All batches, [B, T] int64 on the device, beforehand: reading them takes no time of a step. Batch n has samples
    n * B to (n + 1) * B."""
    samples, batch = Batches(options.tokens, config, ranks), options.batch
    return [[torch.cat(parts).to(device.name)
             for parts in zip(*(samples.of_step(number * batch + place) for place in range(batch)))]
            for number in range(options.warm_up + options.steps)]


def profiled(path):
    """A context in which PyTorch's profiler runs, if there is a path for its Chrome trace."""
    if path is None:
        return contextlib.nullcontext()
    return torch.profiler.profile(on_trace_ready=lambda profiler: profiler.export_chrome_trace(path))


def run_steps(trainer, batches, warm_up, device):
    """The line to print. The host is a step ahead of the device, as Tessera's is: a step's end is waited for when the
    next one is under way."""
    losses, ends = [], []
    for number, batch in enumerate(batches):
        if number == warm_up:
            device.forget_peak()
        losses.append(trainer.step(*batch))
        ends.append(device.mark())
        if number > 0:
            ends[number - 1].wait()
    ends[-1].wait()
    timed = ends[warm_up - 1:]
    return {"samples_s": [end.seconds_since(before) for before, end in zip(timed, timed[1:])],
            "losses": torch.stack(losses).tolist(), "allocated_peak_bytes": device.peak_bytes()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--contender", choices=["eager", "ddp", "fsdp2", "fsdp2_host"], required=True)
    parser.add_argument("--model", required=True, help="model file (JSON)")
    parser.add_argument("--tokens", required=True, help="token file of llm.c, 16 bits a token")
    parser.add_argument("--batch", type=int, required=True, help="samples of a step")
    parser.add_argument("--warm-up", type=int, required=True, help="steps before the timed ones, 1 or more")
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace of all steps, which are slower then")
    options = parser.parse_args()
    ranks, device = Ranks(), Device(options.device)
    with standard_output() as emit:
        if options.contender != "eager":
            if options.device == "cuda":
                torch.cuda.set_device(0)
            dist.init_process_group(device.backend, rank=ranks.rank, world_size=ranks.count)
        config = read_model_config(options.model)
        trainer = Trainer(config, options.contender, device)
        batches = batches_of(options, config, ranks, device)
        with profiled(options.trace):
            emit(run_steps(trainer, batches, options.warm_up, device))
        if options.contender != "eager":
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
