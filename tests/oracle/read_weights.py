"""Loads files of save_weights with PyTorch. Prints the sum of all absolute values of each file, and whether two names
share their memory.

Usage: read_weights.py NAME NAME FILE FORM [FILE FORM...], where the form is dictionary or archive.
"""

import sys

import torch

one, other, *words = sys.argv[1:]
for file, form in zip(words[::2], words[1::2], strict=True):
    weights = torch.load(file, weights_only=True) if form == "dictionary" else torch.jit.load(file).state_dict()
    total = sum(value.double().abs().sum().item() for value in weights.values())
    print(f"{total:.6f} {weights[one].data_ptr() == weights[other].data_ptr()}")
