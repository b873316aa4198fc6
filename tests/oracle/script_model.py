"""Scripts a small language model with torch.jit and saves it. Tests train the script from C++.

Usage: script_model.py FILE [frozen]
"""

import sys

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Script(nn.Module):
    """A model whose embedding and head share one weight. forward uses a buffer, and has a branch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(19, 12)
        self.layers = nn.ModuleList([Block(12, 31) for _ in range(3)])
        self.head = nn.Linear(12, 19, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        if self.training:
            x = x * self.scale
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


torch.manual_seed(1)
script = torch.jit.script(Script())
if "frozen" in sys.argv[2:]:
    script = torch.jit.freeze(script.eval())
script.save(sys.argv[1])
