"""A program's own CommHook sums gradients: each rank sends signs and one scale (EF-signSGD, arXiv 1901.09847)."""

import torch
from torch import nn

import tessera


class Signs(tessera.CommHook):
    def __init__(self):
        self.lacked = {}  # error feedback, by bucket: the part of a gradient that the signs do not contain

    def sum(self, bucket, ranks):  # called while backward runs
        wanted = bucket.gradients + self.lacked.get(bucket.index, 0)
        scale, signs = wanted.abs().mean(), wanted.sign()
        self.lacked[bucket.index] = wanted - scale * signs
        scales, all_signs = ranks.all_gather(scale), ranks.all_gather(signs.to(torch.int8))
        bucket.gradients.zero_()
        for rank in range(ranks.size()):
            bucket.gradients.add_(scales[rank] * all_signs[rank])


torch.manual_seed(1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
strategy = {"strategy": "SHARD_GRADIENTS", "units": {"classes": ["Linear"]}, "compression": {"method": {"type": "hook"}},
            "optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0}}
engine = tessera.Engine(model, strategy, Signs())
torch.manual_seed(tessera.seed_for_rank(2))  # each rank has samples of its own
for step in range(1, 201):
    samples = torch.randn(16, 8)
    engine.backward(nn.functional.mse_loss(model(samples), samples.sin().sum(1, keepdim=True)))
    result = engine.step()
    if tessera.rank() == 0 and step % 50 == 0:
        print(f"step {step}  loss {result.loss:.4f}", flush=True)
