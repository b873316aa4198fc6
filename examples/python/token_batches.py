"""Trains on the bytes of a text, each rank on samples of its own, and goes on from its checkpoint. Usage: token_batches.py TEXT FOLDER."""

import os
import sys

import torch
from torch import nn

import tessera

text, folder = sys.argv[1:]
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(256, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 256))
engine = tessera.Engine(model, {"strategy": "FULL_SHARD", "units": {"classes": ["Linear"]}, "gradient_accumulation": 2, "optimizer": {"lr": 1e-2}})
batches = tessera.TokenBatches(text, 32, batch=8, accumulation=2, vocab_size=256, seed=1)  # the same numbers on every rank
done = 0
if os.path.exists(os.path.join(folder, "latest")):
    loaded = engine.load_checkpoint(folder)
    batches.resume(loaded.data)  # on any number of ranks
    done = loaded.step
for step in range(done + 1, done + 51):
    while not engine.step_is_due():
        batch = batches.next(engine.device)
        loss = nn.functional.cross_entropy(model(batch.input).flatten(0, 1), batch.target.flatten())
        engine.backward(loss, tokens=batch.input.numel(), weight=batch.weight)
    result = engine.step()
    if tessera.rank() == 0 and step % 10 == 0:
        print(f"step {step}  loss {result.loss:.4f}  epoch {batches.epoch}", flush=True)
engine.save_checkpoint(folder, data=batches.cursor(), keep=1)
