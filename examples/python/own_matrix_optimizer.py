"""The program defines an update rule for whole matrices (Shampoo, arXiv 1802.09568), which is sharded like the built-in
rules."""

import torch
from torch import nn

import tessera


class Shampoo(tessera.MatrixOptimizer):
    def states(self, rows, columns):
        return [("left", (rows, rows)), ("right", (columns, columns))]

    def update(self, m):  # one whole matrix, on one rank; AdamW updates vectors
        m.states[0].add_(m.gradient @ m.gradient.T)
        m.states[1].add_(m.gradient.T @ m.gradient)
        direction = inverse_fourth_root(m.states[0]) @ m.gradient @ inverse_fourth_root(m.states[1])
        m.parameter.mul_(1 - m.lr * m.weight_decay).sub_(m.lr * direction)


def inverse_fourth_root(sums):
    values, vectors = torch.linalg.eigh(sums)
    return (vectors * (values.clamp(min=0) + 1e-6) ** -0.25) @ vectors.T


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
strategy = {"strategy": "FULL_SHARD", "units": {"classes": ["Linear"]},
            "optimizer": {"type": "own_matrix", "lr": 3e-2, "weight_decay": 0, "groups": [{"match": ["*.bias"], "lr_ratio": 0.1}]}}
engine = tessera.Engine(model, strategy, Shampoo())
torch.manual_seed(tessera.seed_for_rank(2))  # each rank has samples of its own
for step in range(1, 201):
    samples = torch.randn(16, 8)
    engine.backward(nn.functional.mse_loss(model(samples), samples.sin().sum(1, keepdim=True)))
    result = engine.step()
    if tessera.rank() == 0 and step % 50 == 0:
        print(f"step {step}  loss {result.loss:.4f}", flush=True)
