"""Reads and writes the folders of tensors that exchange.h describes."""

import json
import pathlib

import numpy
import torch

_DTYPES = {"float32": ("<f4", torch.float32), "int64": ("<i8", torch.int64)}


def read_tensors(folder):
    """Returns {name: tensor} in the order of the index."""
    folder = pathlib.Path(folder)
    tensors = {}
    for entry in json.loads((folder / "index.json").read_text()):
        layout, dtype = _DTYPES[entry["dtype"]]
        values = numpy.fromfile(folder / entry["file"], dtype=layout)
        tensors[entry["name"]] = torch.from_numpy(values).to(dtype).reshape(entry["shape"])
    return tensors


def write_tensors(folder, tensors):
    """Writes {name: tensor}. Each tensor is float32 or int64."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = {dtype: (name, layout) for name, (layout, dtype) in _DTYPES.items()}
    index = []
    for name, tensor in tensors.items():
        dtype, layout = names[tensor.dtype]
        file = f"{len(index)}.bin"
        tensor.detach().cpu().contiguous().numpy().astype(layout).tofile(folder / file)
        index.append({"name": name, "dtype": dtype, "shape": list(tensor.shape), "file": file})
    (folder / "index.json").write_text(json.dumps(index, indent=1))
