#!/usr/bin/env python3
"""Training steps of Tessera's Python package on the PyTorch model that torch_step.py and deepspeed_step.py train, in fp32.

    no_shard              NO_SHARD
    full_shard            FULL_SHARD; the ranks of a host share one copy of the parameters, as by default
    full_shard_private    FULL_SHARD with a copy a rank, so that units are gathered

`tessera` must be importable: built (contenders.py puts the build's folder on the path) or installed with pip.
"""

import tessera
import torch
from common import ADAMW, Batches, Ranks, new_model, read_model_config, run_steps, standard_output, training_options

STRATEGIES = {"no_shard": {"strategy": "NO_SHARD"},
              "full_shard": {"strategy": "FULL_SHARD"},
              "full_shard_private": {"strategy": "FULL_SHARD", "host_sharing": False}}


def step_of(model, contender):
    """The function that trains one step on (tokens, targets), and returns this rank's loss."""
    engine = tessera.Engine(model, {"units": {"classes": ["Block"]}, "optimizer": {"type": "adamw", **ADAMW}} | STRATEGIES[contender])

    def step(tokens, targets):
        loss = model(tokens, targets)
        engine.backward(loss)
        engine.step()
        return loss.item()

    return step


def main():
    options = training_options(__doc__, STRATEGIES)
    if options.dtype != "fp32":
        raise SystemExit(f"python_step: --dtype {options.dtype} is not one of its contenders'; they train in fp32")
    ranks = Ranks()
    torch.set_num_threads(1)
    with standard_output() as emit:
        config = read_model_config(options.model)
        step = step_of(new_model(config), options.contender)
        batches = Batches(options.tokens, config, ranks)
        emit(run_steps(lambda number: step(*batches.of_step(number)), options, ranks, meet=tessera.barrier))


if __name__ == "__main__":
    main()
