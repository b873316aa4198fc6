"""The program defines an update rule, which is sharded like the built-in rules. Gradients are divided by a running mean
of their magnitude."""

import torch
from torch import nn

import tessera


class MeanMagnitude(tessera.ElementwiseOptimizer):
    def states(self):
        return ["magnitude"]

    def update(self, e):  # `e`: a run of fp32 elements; it may begin and end anywhere in a parameter
        e.states[0].mul_(0.95).add_(e.gradient.abs(), alpha=0.05)
        e.parameters.mul_(1 - e.lr * e.weight_decay).sub_(e.lr * e.gradient / (e.states[0] + 1e-6))


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
strategy = {"strategy": "FULL_SHARD", "units": {"classes": ["Linear"]},
            "optimizer": {"type": "own", "lr": 3e-3, "groups": [{"match": ["*.bias"], "weight_decay": 0}]}}
engine = tessera.Engine(model, strategy, MeanMagnitude())
torch.manual_seed(tessera.seed_for_rank(2))  # each rank has samples of its own
for step in range(1, 201):
    samples = torch.randn(16, 8)
    engine.backward(nn.functional.mse_loss(model(samples), samples.sin().sum(1, keepdim=True)))
    result = engine.step()
    if tessera.rank() == 0 and step % 50 == 0:
        print(f"step {step}  loss {result.loss:.4f}", flush=True)
