"""Rewrites the weights of a file of torch.save in the forms in which people write weights. The program also writes
other files that people mistake for files of weights.

Usage: rewrite_weights.py FILE FOLDER
"""

import argparse
import json
import pathlib
import sys
import zipfile

import numpy
import torch
from safetensors.torch import save_file

weights = torch.load(sys.argv[1], weights_only=False)  # the file is one of torch::pickle_save, whose pickle has types of TorchScript
folder = pathlib.Path(sys.argv[2])
names = list(weights)


def renamed(rename):
    return {rename(name): value for name, value in weights.items()}


def tree():
    """Returns nested dictionaries, one level for each word of the names."""
    root = {}
    for name, value in weights.items():
        *modules, last = name.split(".")
        node = root
        for word in modules:
            node = node.setdefault(word, {})
        node[last] = value
    return root


def views():
    """Returns tensors that are views of one storage. Each tensor begins where the previous tensor ends, and matrices
    are transposed."""
    flat = torch.cat([value.t().reshape(-1) if value.dim() == 2 else value.reshape(-1) for value in weights.values()])
    begin, result = 0, {}
    for name, value in weights.items():
        piece = flat[begin:begin + value.numel()]
        result[name] = piece.view(*reversed(value.shape)).t() if value.dim() == 2 else piece.view(value.shape)
        begin += value.numel()
    return result


def optimizer_state():
    parameters = [torch.nn.Parameter(value.float().clone()) for value in weights.values()]
    optimizer = torch.optim.AdamW(parameters)
    sum(each.sum() for each in parameters).backward()
    optimizer.step()
    return optimizer.state_dict()


def write_several(suffix, write):
    """Writes a model in two files and an index, as transformers does."""
    stem = {"bin": "pytorch_model", "safetensors": "model"}[suffix]
    (folder / suffix).mkdir()
    index = {}
    for i, half in enumerate([names[0::2], names[1::2]]):
        file = f"{stem}-{i + 1:05}-of-00002.{suffix}"
        write({name: weights[name].clone() for name in half}, folder / suffix / file)
        index.update(dict.fromkeys(half, file))
    text = {"metadata": {"total_size": 1}, "weight_map": index}
    (folder / suffix / f"{stem}.{suffix}.index.json").write_text(json.dumps(text))


torch.save(weights, folder / "plain.pt")
torch.save(weights, folder / "protocol_4.pt", pickle_protocol=4)
torch.save({"model": weights}, folder / "model.pt")
torch.save({"epoch": 3, "state_dict": weights, "optimizer": optimizer_state(), "args": argparse.Namespace(lr=0.1),
            "best": torch.tensor(0.5), "names": names}, folder / "trainer.pt")
torch.save({"runs": [{"checkpoint": {"weights": weights, "step": 7}}]}, folder / "deep.pt")
torch.save(tree(), folder / "tree.pt")
torch.save({"state_dict": views()}, folder / "views.pt")
torch.save(renamed(lambda name: f"module.{name}"), folder / "parallel.pt")
torch.save({"model": renamed(lambda name: f"_orig_mod.{name.replace('blocks.', 'blocks._orig_mod.')}")}, folder / "compiled.pt")
torch.save(renamed(lambda name: f"net.inner.{name}"), folder / "prefixed.pt")
torch.save({"model": weights, "ema": renamed(lambda name: name)}, folder / "averaged.pt")
torch.save({**weights, "epoch": 3}, folder / "beside.pt")
torch.save(renamed(lambda name: name.replace("norm.weight", "norm.wieght")), folder / "misspelt.pt")
save_file({name: value.clone() for name, value in weights.items()}, folder / "one.safetensors")
write_several("safetensors", save_file)
write_several("bin", torch.save)

torch.save(weights, folder / "legacy.pt", _use_new_zipfile_serialization=False)
torch.save(weights, folder / "legacy_4.pt", _use_new_zipfile_serialization=False, pickle_protocol=4)
torch.save(torch.nn.Linear(2, 2), folder / "pickled_module.pt")
torch.save(weights[names[0]], folder / "tensor.pt")
torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), folder / "script.pt")
torch.jit.save(torch.jit.freeze(torch.jit.script(torch.nn.Linear(2, 2)).eval()), folder / "frozen.pt")
numpy.savez(folder / "arrays.npz", **{name: value.float().numpy() for name, value in weights.items()})
numpy.save(folder / "array.npy", numpy.ones(3))
plain = (folder / "plain.pt").read_bytes()
(folder / "short.pt").write_bytes(plain[:len(plain) // 2])
with zipfile.ZipFile(folder / "of_files.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    archive.writestr("README.md", "weights")
    archive.writestr("run/plain.pt", plain)
