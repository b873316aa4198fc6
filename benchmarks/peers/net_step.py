#!/usr/bin/env python3
"""Training steps of PyTorch, DeepSpeed and Tessera's Python package on one model over a network, in fp32 over Gloo.
Started once a rank, with torchrun's variables; GLOO_SOCKET_IFNAME names the link.

    alone               one rank, no communication
    ddp                 DistributedDataParallel with its defaults
    ddp_fp16            with PyTorch's hook that sends gradients in fp16
    ddp_power_sgd       with PyTorch's hook for PowerSGD of rank 4
    fsdp2               fully_shard a block, and the rest as the root
    fsdp2_no_reshard    the same; parameters stay gathered from forward to backward
    zero2, zero3        DeepSpeed's stages, with its own CPU Adam
    tessera_no_shard, tessera_full_shard    Tessera's package

Rank 0 writes the metrics file, in the form of `tessera train --metrics`: a header {"event", "parameters"}, then a line
{"step", "loss", "seconds"} as each step ends. step: from 1. seconds: since the step before it ended; the first's are
from its own start.
"""

import argparse
import json
import os
import time
import types

import torch
from common import ADAMW, Batches, Ranks, new_model, read_model_config

POWER_SGD_RANK = 4
POWER_SGD_START = 2  # the earliest step that its warm start allows
ONE_BUCKET_MB = 1 << 14  # with several buckets the hook begins anew in every step over Gloo
ZERO = ("zero2", "zero3")
TESSERA = ("tessera_no_shard", "tessera_full_shard")
CONTENDERS = ("alone", "ddp", "ddp_fp16", "ddp_power_sgd", "fsdp2", "fsdp2_no_reshard", *ZERO, *TESSERA)


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


def step_of_torch(model, contender, ranks):
    """The function that trains one step on (tokens, targets), and returns its loss."""
    if contender.startswith("fsdp2"):
        from torch_step import shard
        module = shard(model, ranks, "fp32", reshard=contender == "fsdp2")
    else:
        module = model if contender == "alone" else with_ddp(model, contender)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **ADAMW)

    def step(tokens, targets):
        loss = module(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def step_of_deepspeed(model, contender):
    from deepspeed_step import DeepSpeedCPUAdam, configuration, deepspeed
    optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
    settings = configuration(types.SimpleNamespace(contender=contender, dtype="fp32"),
                             sum(parameter.numel() for parameter in model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step(tokens, targets):
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def new_step(contender, model, ranks):
    """The contender's function that trains one step on (tokens, targets), and returns its loss."""
    if contender in ZERO:
        return step_of_deepspeed(model, contender)
    if contender in TESSERA:
        from python_step import step_of
        return step_of(model, contender.removeprefix("tessera_"))
    return step_of_torch(model, contender, ranks)


def joined(contender):
    """This rank's place, once all have met; Tessera's meet where they ask for an Engine."""
    ranks = Ranks()
    if contender in ZERO:
        from deepspeed_step import deepspeed
        deepspeed.init_distributed(dist_backend="gloo")
    elif contender not in TESSERA:
        ranks.join()
    return ranks


def train(step, batches, steps, note):
    end = time.perf_counter()
    for number in range(steps):
        loss = step(*batches.of_step(number))
        start, end = end, time.perf_counter()
        note({"step": number + 1, "loss": loss, "seconds": end - start})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--model", required=True, help="model file (JSON)")
    parser.add_argument("--tokens", required=True, help="token file of llm.c, 16 bits a token")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--metrics", required=True, help="file that rank 0 writes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    ranks = joined(options.contender)
    config = read_model_config(options.model)
    model = new_model(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    step = new_step(options.contender, model, ranks)
    with open(options.metrics if ranks.rank == 0 else os.devnull, "w", buffering=1) as metrics:
        note = lambda line: metrics.write(json.dumps(line) + "\n")  # noqa: E731
        note({"event": "start", "parameters": parameters})
        train(step, Batches(options.tokens, config, ranks), options.steps, note)
    if options.contender in TESSERA:
        return
    ranks.leave()
    # Gloo's worker threads, which DDP's hooks keep, sometimes abort a process that is being taken apart.
    os._exit(0)


if __name__ == "__main__":
    main()
