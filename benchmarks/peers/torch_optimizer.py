#!/usr/bin/env python3
"""One thread's optimizer step over one flat tensor.

    fused_fp32      torch.optim.AdamW(fused=True) on fp32 parameters and gradients
    chain_bf16      what mixed precision costs in PyTorch: bf16 gradients to fp32, clip_grad_norm_, fused AdamW on the
                    fp32 masters, copy back to bf16
    deepspeed_fp32  DeepSpeedCPUAdam(adamw_mode=True) on fp32 parameters and gradients
    deepspeed_chain_bf16  chain_bf16 with DeepSpeedCPUAdam on the masters

Prints one JSON line: {"peer", "numel", "threads", "samples_s": [...]}.
"""

import argparse
import os
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402
from common import ADAMW, standard_output  # noqa: E402

CLIP = 1.0


def fused_fp32(numel):
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel) * 1e-3
    return torch.optim.AdamW([parameter], fused=True, **ADAMW).step


def deepspeed_fp32(numel):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel) * 1e-3
    return DeepSpeedCPUAdam([parameter], adamw_mode=True, **ADAMW).step


def chain_bf16(numel, make_optimizer=lambda master: torch.optim.AdamW([master], fused=True, **ADAMW)):
    master = torch.nn.Parameter(torch.randn(numel))
    parameter = master.detach().bfloat16()
    gradient = (torch.randn(numel) * 1e-3).bfloat16()
    master.grad = torch.zeros(numel)
    optimizer = make_optimizer(master)

    def step():
        master.grad.copy_(gradient)
        torch.nn.utils.clip_grad_norm_([master], CLIP)
        optimizer.step()
        parameter.copy_(master.detach())

    return step


def deepspeed_chain_bf16(numel):
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return chain_bf16(numel, lambda master: DeepSpeedCPUAdam([master], adamw_mode=True, **ADAMW))


CONTENDERS = {"fused_fp32": fused_fp32, "chain_bf16": chain_bf16, "deepspeed_fp32": deepspeed_fp32,
              "deepspeed_chain_bf16": deepspeed_chain_bf16}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--numel", type=int, required=True, help="parameters")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with standard_output() as emit:
        step = CONTENDERS[options.contender](options.numel)
        samples = []
        for number in range(options.warm_up + options.steps):
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
        emit({"peer": options.contender, "numel": options.numel, "threads": 1, "samples_s": samples[options.warm_up:]})


if __name__ == "__main__":
    main()
