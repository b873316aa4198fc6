#!/usr/bin/env python3
"""Training steps of PyTorch: alone (no communication), DDP, and FSDP2 with and without resharding after forward.

bf16 means bf16 parameters. `alone` then has nothing else: the least work there is. `ddp` keeps fp32 masters beside
the model, as its users do by hand. FSDP2 keeps fp32 shards (MixedPrecisionPolicy). Gradients travel in bf16.
"""

import torch
from common import (ADAMW, Batches, Ranks, new_model, read_model_config, run_steps,
                    standard_output, training_options)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CONTENDERS = ["alone", "ddp", "fsdp2", "fsdp2_no_reshard"]


def shard(model, ranks, dtype, reshard):
    """FSDP2 a block, and the rest as the root."""
    arguments = {"mesh": init_device_mesh("cpu", (ranks.count,)), "reshard_after_forward": reshard}
    if dtype == "bf16":
        arguments["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in model.units():
        fully_shard(unit, **arguments)
    fully_shard(model, **arguments)
    return model


class Trainer:
    """forward, backward and update; the update's form depends on who holds the fp32 values."""

    def __init__(self, config, options, ranks):
        model = new_model(config)
        self.masters = []
        if options.contender.startswith("fsdp2"):
            self.module = shard(model, ranks, options.dtype, reshard=options.contender == "fsdp2")
        else:
            if options.dtype == "bf16" and options.contender == "ddp":
                self.masters = [torch.nn.Parameter(p.detach().clone()) for p in model.parameters()]
            if options.dtype == "bf16":
                model = model.bfloat16()
            # Without gradient_as_bucket_view each gradient would exist twice.
            ddp = options.contender == "ddp"
            self.module = DistributedDataParallel(model, gradient_as_bucket_view=True) if ddp else model
        self.parameters = list(self.module.parameters())
        self.optimizer = torch.optim.AdamW(self.masters or self.parameters, fused=True, **ADAMW)

    def step(self, tokens, targets):
        loss = self.module(tokens, targets)
        loss.backward()
        self._take_gradients()
        self.optimizer.step()
        self._publish()
        for parameter in self.parameters:
            parameter.grad = None
        return loss.item()

    def _take_gradients(self):
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float()

    @torch.no_grad()
    def _publish(self):
        for master, parameter in zip(self.masters, self.parameters):
            parameter.copy_(master)
            master.grad = None


def main():
    options = training_options(__doc__, CONTENDERS)
    ranks = Ranks()
    torch.set_num_threads(1)
    with standard_output() as emit:
        ranks.join()
        config = read_model_config(options.model)
        trainer = Trainer(config, options, ranks)
        batches = Batches(options.tokens, config, ranks)
        emit(run_steps(lambda number: trainer.step(*batches.of_step(number)), options, ranks))
        ranks.leave()


if __name__ == "__main__":
    main()
