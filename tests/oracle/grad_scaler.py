#!/usr/bin/env python3
"""Runs torch.amp.GradScaler over a pattern of overflows, as a reference for Tessera's loss scaling.

    Usage: grad_scaler.py --pattern ....x..xx --initial 1024 --growth-interval 3

`x` is a step whose gradient is infinite, and `.` is a step whose gradient is finite. The output is one JSON object.
It has the scale that each step used, whether the optimizer's step was skipped, and the scale after the last step.
"""

import argparse
import json

import torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pattern", required=True)
    parser.add_argument("--initial", type=float, required=True)
    parser.add_argument("--growth-interval", type=int, required=True)
    options = parser.parse_args()
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=options.initial, growth_interval=options.growth_interval)
    result = {"scales": [], "skipped": []}
    for step in options.pattern:
        before = parameter.detach().clone()
        result["scales"].append(scaler.get_scale())
        optimizer.zero_grad()
        scaler.scale((parameter * (float("inf") if step == "x" else 1.0)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        result["skipped"].append(torch.equal(before, parameter))
    result["last_scale"] = scaler.get_scale()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
