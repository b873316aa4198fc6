#!/usr/bin/env python3
"""Times one optimizer step over one flat tensor, on one thread or on a GPU.

    fused_fp32      torch.optim.AdamW(fused=True) on fp32 parameters and gradients
    fused_bf16      fused_fp32 with everything in bf16: no masters, so the result differs
    chain_bf16      mixed precision in PyTorch: bf16 gradients to fp32, clip_grad_norm_, fused AdamW on the
                    fp32 masters, copy back to bf16; on a GPU also GradScaler.unscale_ (which looks for infinities)
    deepspeed_fp32  DeepSpeedCPUAdam(adamw_mode=True) on fp32 parameters and gradients
    deepspeed_chain_bf16  chain_bf16 with DeepSpeedCPUAdam on the masters

`--isa avx2` excludes instructions wider than AVX2. The variable ATEN_CPU_CAPABILITY limits PyTorch's loops to
AVX2, and DeepSpeed's operator is compiled again for AVX2, with its extensions in another folder.

Prints one JSON line: {"numel", "bytes", "samples_s": [...]}. bytes: the bytes that the contender's passes read and
write.
"""

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--contender", required=True)
parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
parser.add_argument("--numel", type=int, required=True, help="parameters")
parser.add_argument("--warm-up", type=int, default=2)
parser.add_argument("--steps", type=int, default=9, help="timed steps")
parser.add_argument("--isa", choices=["avx2"], help="instruction set; the processor's best without it")
options = parser.parse_args()

os.environ.setdefault("DS_ACCELERATOR", "cpu")
if options.isa:  # this must be set before torch is imported
    os.environ["ATEN_CPU_CAPABILITY"] = options.isa
    os.environ["TORCH_EXTENSIONS_DIR"] = os.environ.get("TORCH_EXTENSIONS_DIR", "extensions") + f"_{options.isa}"

import torch  # noqa: E402
from common import ADAMW, standard_output  # noqa: E402
from on_device import Device  # noqa: E402

CLIP = 1.0
FUSED_PASS = 7  # reads of parameter, gradient and two moments, and writes of all except the gradient


def torch_adamw(parameter):
    return torch.optim.AdamW([parameter], fused=True, **ADAMW)


def deepspeed_adamw(parameter):
    if options.isa:
        from deepspeed.ops.op_builder.builder import OpBuilder
        OpBuilder.cpu_arch = lambda self: "-march=x86-64-v3"
        OpBuilder.simd_width = lambda self: "-D__AVX256__"
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    return DeepSpeedCPUAdam([parameter], adamw_mode=True, **ADAMW)


def fused(device, numel, make_optimizer=torch_adamw, dtype=torch.float32):
    parameter = torch.nn.Parameter(torch.randn(numel, device=device.name, dtype=dtype))
    parameter.grad = torch.full_like(parameter, 1e-3) if device.on_gpu else torch.randn(numel, dtype=dtype) * 1e-3
    return FUSED_PASS * parameter.element_size() * numel, make_optimizer(parameter).step


def chain(device, numel, make_optimizer=torch_adamw):
    master = torch.nn.Parameter(torch.randn(numel, device=device.name))
    parameter = master.detach().bfloat16()
    master.grad = torch.zeros_like(master)
    gradient = torch.full_like(parameter, 1e-3) if device.on_gpu else (torch.randn(numel) * 1e-3).bfloat16()
    optimizer = make_optimizer(master)
    scaler = torch.amp.GradScaler(device.name, init_scale=1024.0, enabled=device.on_gpu)
    scaler.scale(torch.zeros((), device=device.name))  # this makes the tensor of the scale

    def step():
        master.grad.copy_(gradient)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([master], CLIP)
        scaler.step(optimizer)
        scaler.update()
        parameter.copy_(master.detach())

    # The sum of the bytes per element that are read and written: cast 2 + 4, unscale 4 + 4, norm 4, clip 4 + 4, the
    # fused pass, and copy 4 + 2. Only a GPU has the pass "unscale".
    return (24 + 8 * device.on_gpu + FUSED_PASS * 4) * numel, step


CONTENDERS = {"fused_fp32": fused,
              "fused_bf16": lambda device, numel: fused(device, numel, dtype=torch.bfloat16),
              "chain_bf16": chain,
              "deepspeed_fp32": lambda device, numel: fused(device, numel, deepspeed_adamw),
              "deepspeed_chain_bf16": lambda device, numel: chain(device, numel, deepspeed_adamw)}


def main():
    if options.contender not in CONTENDERS:
        parser.error(f"--contender: wanted one of {', '.join(CONTENDERS)}")
    device = Device(options.device)
    if not device.on_gpu:
        torch.set_num_threads(1)
    torch.manual_seed(1)
    with standard_output() as emit:
        bytes_moved, step = CONTENDERS[options.contender](device, options.numel)
        emit({"numel": options.numel, "bytes": bytes_moved, "samples_s": device.samples_of(step, options.warm_up, options.steps)})


if __name__ == "__main__":
    main()
