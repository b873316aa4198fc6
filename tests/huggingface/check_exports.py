#!/usr/bin/env python3
"""Loads Tessera's exports with `transformers`, and compares them with the models that make_models.py made.

    Usage: check_exports.py FOLDER

FOLDER/<name>/exported must have the tensors of FOLDER/<name>/model byte for byte, and give the same logits.
"""

import pathlib
import sys

import torch
import transformers
from safetensors import safe_open

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "oracle"))
from exchange import read_tensors  # noqa: E402


def tensors_of(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors.update({name: opened.get_tensor(name) for name in opened.keys()})
    return tensors


def main(folder):
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for place in sorted(path for path in folder.iterdir() if (path / "exported").is_dir()):
        before, after = tensors_of(place / "model"), tensors_of(place / "exported")
        assert before.keys() == after.keys(), f"{place.name}: {sorted(before.keys() ^ after.keys())}"
        for name, tensor in before.items():
            same = tensor.dtype == after[name].dtype and torch.equal(tensor, after[name])
            assert same, f"{place.name}: {name} is not what it was"
        model, info = transformers.AutoModelForCausalLM.from_pretrained(place / "exported", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], f"{place.name}: {info}"
        wanted = read_tensors(place / "wanted")["logits"]
        logits = model.eval()(read_tensors(place / "batch")["tokens"]).logits
        difference = (logits - wanted).abs().max().item()
        assert difference < 1e-6, f"{place.name}: logits differ by {difference}"
        print(place.name, type(model).__name__, f"{difference:.1e}")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
