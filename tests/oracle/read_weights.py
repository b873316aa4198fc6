"""Prints what PyTorch finds in a file of save_weights: the sum of all absolute values, and whether two names share their memory.

Usage: read_weights.py FILE FORM NAME NAME, the form dictionary or archive.
"""

import sys

import torch

file, form, one, other = sys.argv[1:]
weights = torch.load(file, weights_only=True) if form == "dictionary" else torch.jit.load(file).state_dict()
total = sum(value.double().abs().sum().item() for value in weights.values())
print(f"{total:.6f} {weights[one].data_ptr() == weights[other].data_ptr()}")
