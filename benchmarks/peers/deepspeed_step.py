#!/usr/bin/env python3
"""Training steps of DeepSpeed's ZeRO stages 1, 2 and 3 on CPU ranks over Gloo, with its own CPU Adam.

On CPU ranks DeepSpeed 0.19 needs DS_ACCELERATOR=cpu, and `ninja` and `g++` where its operator has not been compiled
(benchmarks/setup does that). LOCAL_RANK must be in the environment, as torchrun puts it. Without Intel's oneCCL it
warns, and runs on Gloo.
"""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("LOCAL_RANK", os.environ.get("RANK", "0"))

import deepspeed  # noqa: E402
import torch  # noqa: E402
from common import (ADAMW, Batches, Ranks, new_model, read_model_config, run_steps,  # noqa: E402
                    standard_output, training_options)
from deepspeed.ops.adam import DeepSpeedCPUAdam  # noqa: E402

CONTENDERS = ["zero1", "zero2", "zero3"]


def configuration(options, parameters):
    """DeepSpeed's defaults, but for buckets: 5e8 elements are 2 GB, more than these models have."""
    bucket = min(parameters, int(5e8))
    stage = int(options.contender[-1])
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket},
        "zero_allow_untested_optimizer": False,
    }


def main():
    options = training_options(__doc__, CONTENDERS)
    ranks = Ranks()
    torch.set_num_threads(1)
    with standard_output() as emit:
        deepspeed.init_distributed(dist_backend="gloo")
        config = read_model_config(options.model)
        model = new_model(config)
        optimizer = DeepSpeedCPUAdam(model.parameters(), adamw_mode=True, **ADAMW)
        settings = configuration(options, sum(p.numel() for p in model.parameters()))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
        batches = Batches(options.tokens, config, ranks)

        def step(number):
            loss = engine(*batches.of_step(number))
            engine.backward(loss)
            engine.step()
            return loss.item()

        emit(run_steps(step, options, ranks))
        ranks.leave()


if __name__ == "__main__":
    main()
