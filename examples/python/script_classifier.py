"""Scripts a classifier of points for examples/script_module.cc. If trained weights are given, the program instead loads
them into the script and prints how many points it classifies correctly.

Usage: script_classifier.py classifier.pt [weights.pt]
"""

import sys

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 64), nn.Linear(64, 64)])
        self.head = nn.Linear(64, 2)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        x = points
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


torch.manual_seed(1)
script = torch.jit.script(Classifier())
if len(sys.argv) == 2:
    script.save(sys.argv[1])
else:
    script.load_state_dict(torch.load(sys.argv[2], weights_only=True))
    points = torch.rand(1000, 2) * 4 - 2
    right = (script(points).argmax(1) == (points.square().sum(1) < 1.5)).float().mean()
    print(f"points {len(points)}  right {right:.3f}")
