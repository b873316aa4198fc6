#!/usr/bin/env python3
"""Measures the highest speeds of the GPU that PyTorch's own calls reach.

    copy    a copy from device memory to device memory; bytes read and written
    gemm    bf16 matrices of 8192 x 8192, random values; floating-point operations
    h2d     a copy from pinned host memory to the device; bytes
    d2h     a copy from the device to pinned host memory; bytes

Prints one JSON line: {"limits": {name: {"amount", "unit": "B" | "FLOP", "samples_s": [...]}}, "versions": {...}}.
"""

import argparse

import torch
from common import standard_output
from on_device import Device


def copy(device, count):
    source, target = (torch.zeros(count, dtype=torch.uint8, device=device.name) for _ in range(2))
    return 2 * count, "B", lambda: target.copy_(source)


def gemm(device, width):
    left, right = (torch.randn(width, width, device=device.name).bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    return 2 * width**3, "FLOP", lambda: torch.matmul(left, right, out=product)


def host_copy(device, count, to_device):
    host = torch.zeros(count, dtype=torch.uint8, pin_memory=device.name == "cuda")
    there = torch.zeros(count, dtype=torch.uint8, device=device.name)
    target, source = (there, host) if to_device else (host, there)
    return count, "B", lambda: target.copy_(source, non_blocking=True)


def versions_of(device):
    if device.name == "cpu":
        return {}
    return {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version()),
            "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes, whose figures mean nothing")
    options = parser.parse_args()
    device = Device(options.device)
    many, pinned, width = (2**20, 2**20, 256) if options.quick else (2**31, 2**29, 8192)
    makers = {"copy": lambda: copy(device, many), "gemm": lambda: gemm(device, width),
              "h2d": lambda: host_copy(device, pinned, to_device=True),
              "d2h": lambda: host_copy(device, pinned, to_device=False)}
    with standard_output() as emit:
        limits = {}
        for name, make in makers.items():
            amount, unit, body = make()
            limits[name] = {"amount": amount, "unit": unit, "samples_s": device.samples_of(body, 3, 20)}
        emit({"limits": limits, "versions": versions_of(device)})


if __name__ == "__main__":
    main()
