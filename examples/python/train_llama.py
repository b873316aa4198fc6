"""Trains a small Llama of transformers on the bytes of a text file, with plain PyTorch.

docs/start-python.md has the lines that shard it.
"""

import pathlib
import sys

import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
from transformers import LlamaConfig, LlamaForCausalLM


class Bytes(Dataset):
    """The samples are pieces of `length` bytes, one after another."""

    def __init__(self, path, length=64):
        text = torch.frombuffer(bytearray(pathlib.Path(path).read_bytes()), dtype=torch.uint8)
        self.samples = text[:len(text) // length * length].reshape(-1, length).long()

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


def main(path, epochs=1, batch=16):
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=4, num_attention_heads=4)
    model = LlamaForCausalLM(config)
    data = Bytes(path)
    sampler = RandomSampler(data)
    loader = DataLoader(data, batch, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for step, tokens in enumerate(loader):
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"epoch {epoch}  step {step}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
