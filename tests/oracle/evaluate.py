#!/usr/bin/env python3
"""Evaluates a model of models.py once. It reads weights, tokens and targets, and writes the results with which a C++
test compares.

    Usage: evaluate.py --init weights --batch batch --config model.json --out result

`--batch` holds `tokens` and `targets`, [B, T] int64. `--out` receives `logits`, `loss` and the gradient of every
parameter, under the name of the parameter. All folders are in the format of exchange.h.
"""

import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from exchange import read_tensors, write_tensors  # noqa: E402
from models import make_model  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--init", "--batch", "--config", "--out"):
        parser.add_argument(name, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(json.loads(pathlib.Path(options.config).read_text()))
    model.load_state_dict(read_tensors(options.init), strict=True)
    batch = read_tensors(options.batch)
    loss = model(batch["tokens"], batch["targets"])
    loss.backward()
    result = {"logits": model(batch["tokens"]), "loss": loss}
    result.update({name: parameter.grad for name, parameter in model.named_parameters()})
    write_tensors(options.out, result)


if __name__ == "__main__":
    main()
