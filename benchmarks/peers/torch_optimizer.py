#!/usr/bin/env python3
"""One thread's optimizer step over one flat tensor.

    fused_fp32      torch.optim.AdamW(fused=True) on fp32 parameters and gradients
    chain_bf16      what mixed precision costs in PyTorch: bf16 gradients to fp32, clip_grad_norm_, fused AdamW on the
                    fp32 masters, copy back to bf16
    deepspeed_fp32  DeepSpeedCPUAdam(adamw_mode=True) on fp32 parameters and gradients
    deepspeed_chain_bf16  chain_bf16 with DeepSpeedCPUAdam on the masters

With `--isa avx2` nothing wider than AVX2 is used: PyTorch chooses so, and DeepSpeed's operator is compiled again for it, with its
extensions in a folder beside.

Prints one JSON line: {"peer", "numel", "threads", "samples_s": [...]}.
"""

import argparse
import os
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--contender", required=True)
parser.add_argument("--numel", type=int, required=True, help="parameters")
parser.add_argument("--warm-up", type=int, default=2)
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--isa", choices=["avx2"], help="instruction set; the processor's best without it")
options = parser.parse_args()

os.environ.setdefault("DS_ACCELERATOR", "cpu")
if options.isa:  # before torch looks
    os.environ["ATEN_CPU_CAPABILITY"] = options.isa
    os.environ["TORCH_EXTENSIONS_DIR"] = os.environ.get("TORCH_EXTENSIONS_DIR", "extensions") + f"_{options.isa}"

import torch  # noqa: E402
from common import ADAMW, standard_output  # noqa: E402

CLIP = 1.0


def fused_fp32(numel):
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel) * 1e-3
    return torch.optim.AdamW([parameter], fused=True, **ADAMW).step


def deepspeed_adam():
    if options.isa:
        from deepspeed.ops.op_builder.builder import OpBuilder
        OpBuilder.cpu_arch = lambda self: "-march=x86-64-v3"
        OpBuilder.simd_width = lambda self: "-D__AVX256__"
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam


def deepspeed_fp32(numel):
    parameter = torch.nn.Parameter(torch.randn(numel))
    parameter.grad = torch.randn(numel) * 1e-3
    return deepspeed_adam()([parameter], adamw_mode=True, **ADAMW).step


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
    return chain_bf16(numel, lambda master: deepspeed_adam()([master], adamw_mode=True, **ADAMW))


CONTENDERS = {"fused_fp32": fused_fp32, "chain_bf16": chain_bf16, "deepspeed_fp32": deepspeed_fp32,
              "deepspeed_chain_bf16": deepspeed_chain_bf16}


def main():
    if options.contender not in CONTENDERS:
        parser.error(f"--contender: wanted one of {', '.join(CONTENDERS)}")
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
