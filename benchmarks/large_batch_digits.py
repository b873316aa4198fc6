"""Trains a small perceptron on scikit-learn's digits, run by run, for large_batch.py, which starts this program.

    large_batch_digits.py DIGITS RUNS OUT

DIGITS is the file that `examples/images/digits.py` writes: a line for each picture, with 64 numbers from 0 to 16 and
the class. RUNS is a JSON list of runs: name, strategy, batch, seed, epochs. OUT gets a JSON line for each run that has
ended: its name, and the result of `trained`.
"""

import json
import math
import pathlib
import sys

import torch
from torch import nn

import tessera

HELD_OUT, SPLIT_SEED = 360, 0


def split(path):
    """Returns two pairs (pictures, classes): one for training, and one that is held out. The split is the same for all
    runs."""
    rows = [[float(number) for number in line.split(",")] for line in pathlib.Path(path).read_text().split()]
    table = torch.tensor(rows)
    table = table[torch.randperm(len(table), generator=torch.Generator().manual_seed(SPLIT_SEED))]
    pictures, classes = table[:, :64] / 16, table[:, 64].long()
    return (pictures[HELD_OUT:], classes[HELD_OUT:]), (pictures[:HELD_OUT], classes[:HELD_OUT])


def perceptron():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


@torch.no_grad()
def judged(model, pictures, classes):
    """Returns (mean loss, accuracy)."""
    scores = model(pictures)
    return nn.functional.cross_entropy(scores, classes).item(), (scores.argmax(1) == classes).double().mean().item()


def trained(run, training, held_out):
    """Returns losses, accuracies and the gradient noise scale. The noise scale is None if the noise hides the
    gradient."""
    torch.manual_seed(run["seed"])
    model = perceptron()
    engine = tessera.Engine(model, run["strategy"])
    pictures, classes = training
    noise_square = noise_variance = 0.0
    for epoch in range(run["epochs"]):
        for rows in torch.randperm(len(classes)).split(run["batch"]):
            for part in rows.chunk(2):
                loss = nn.functional.cross_entropy(model(pictures[part]), classes[part])
                engine.backward(loss, samples=len(part), weight=len(part))
            # The last step of an epoch may have only one sample, and then only one microbatch.
            result = engine.step(partial=len(rows) < 2)
            if 2 * epoch >= run["epochs"] and math.isfinite(result.noise_variance):
                noise_square += result.noise_square
                noise_variance += result.noise_variance
    loss, accuracy = judged(model, *training)
    held_out_loss, held_out_accuracy = judged(model, *held_out)
    engine.close()
    return {"loss": loss, "accuracy": accuracy, "held_out_loss": held_out_loss, "held_out_accuracy": held_out_accuracy,
            "noise_scale": noise_variance / noise_square if noise_square > 0 else None}


def main():
    digits, runs, out = sys.argv[1:]
    training, held_out = split(digits)
    torch.set_num_threads(1)
    with open(out, "a", encoding="utf-8") as lines:
        for run in json.loads(pathlib.Path(runs).read_text()):
            lines.write(json.dumps({"name": run["name"]} | trained(run, training, held_out)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
