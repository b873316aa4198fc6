"""What torch.load finds in a file of weights: the sum of all absolute values, and whether two names share their memory.

Usage: read_weights.py FILE NAME NAME
"""

import sys

import torch

file, one, other = sys.argv[1:]
weights = torch.load(file, weights_only=True)
total = sum(value.double().abs().sum().item() for value in weights.values())
print(f"{total:.6f} {weights[one].data_ptr() == weights[other].data_ptr()}")
