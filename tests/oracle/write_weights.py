"""Writes the state_dict of a module as a PyTorch program does: an OrderedDict with a tied parameter, a transposed
parameter and buffers.

Usage: write_weights.py FILE PROTOCOL [FILE PROTOCOL...], where PROTOCOL is the protocol of pickle. The program prints
the sum of all absolute values. """

import sys

import torch

words = sys.argv[1:]
torch.manual_seed(1)
model = torch.nn.Module()
model.norm = torch.nn.BatchNorm1d(4)
model.linear = torch.nn.Linear(4, 2)
model.linear.weight = torch.nn.Parameter(torch.randn(4, 2).t())
model.tied = torch.nn.Linear(4, 2, bias=False)
model.tied.weight = model.linear.weight
model.norm.running_mean.fill_(3)
model.register_buffer("strided", torch.arange(6).view(2, 3).t())
model.register_buffer("empty", torch.zeros(0, 3))
weights = model.state_dict()
for file, protocol in zip(words[::2], words[1::2], strict=True):
    torch.save(weights, file, pickle_protocol=int(protocol))
print(f"{sum(value.double().abs().sum().item() for value in weights.values()):.6f}")
