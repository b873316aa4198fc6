#!/usr/bin/env python3
"""PyTorch's optimizer step over one flat tensor on the GPU.

    fused_fp32   torch.optim.AdamW(fused=True) on fp32 parameters and gradients
    fused_bf16   the same, all of it in bf16: no masters, so another result
    chain_bf16   mixed precision: bf16 gradients to fp32, GradScaler.unscale_ (which looks for infinities),
                 clip_grad_norm_, fused AdamW on the fp32 masters, copy back to bf16

Prints one JSON line: {"numel", "bytes", "samples_s": [...]}. bytes: what the passes of the contender read and write.
"""

import argparse

import torch
from on_device import Device

from common import ADAMW, standard_output  # on_device says where it is

CLIP = 1.0
FUSED_PASS = 7  # reads parameter, gradient and two moments, writes all but the gradient


def fused(device, numel, dtype):
    parameter = torch.nn.Parameter(torch.randn(numel, device=device.name, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 1e-3)
    step = torch.optim.AdamW([parameter], fused=True, **ADAMW).step
    return FUSED_PASS * parameter.element_size() * numel, step


def chain(device, numel):
    master = torch.nn.Parameter(torch.randn(numel, device=device.name))
    parameter = master.detach().bfloat16()
    master.grad = torch.zeros_like(master)
    gradient = torch.full_like(parameter, 1e-3)
    optimizer = torch.optim.AdamW([master], fused=True, **ADAMW)
    scaler = torch.amp.GradScaler(device.name, init_scale=1024.0)
    scaler.scale(torch.zeros((), device=device.name))  # makes the scale's tensor

    def step():
        master.grad.copy_(gradient)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([master], CLIP)
        scaler.step(optimizer)
        scaler.update()
        parameter.copy_(master.detach())

    # cast 2 + 4, unscale 4 + 4, norm 4, clip 4 + 4, the fused pass, copy 4 + 2
    return (32 + FUSED_PASS * 4) * numel, step


CONTENDERS = {"fused_fp32": lambda device, numel: fused(device, numel, torch.float32),
              "fused_bf16": lambda device, numel: fused(device, numel, torch.bfloat16),
              "chain_bf16": chain}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--contender", choices=CONTENDERS, required=True)
    parser.add_argument("--numel", type=int, required=True, help="parameters")
    parser.add_argument("--steps", type=int, default=9, help="timed steps, after 2 others")
    options = parser.parse_args()
    torch.manual_seed(1)
    device = Device(options.device)
    with standard_output() as emit:
        bytes_moved, step = CONTENDERS[options.contender](device, options.numel)
        emit({"numel": options.numel, "bytes": bytes_moved, "samples_s": device.samples_of(step, 2, options.steps)})


if __name__ == "__main__":
    main()
