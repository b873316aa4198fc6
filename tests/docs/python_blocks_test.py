"""Runs the Python blocks of pages, and reads the JSON blocks as strategies and models. Each block gets the names that
it needs."""

import ast
import json
import os
import pathlib
import subprocess
import tempfile
import types
import unittest

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

import blocks
import check_blocks
import tessera
from tessera import _native

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOUND = blocks.all_blocks(ROOT)


class LlamaDecoderLayer(nn.Linear):
    pass


class Model(nn.Module):
    """A module with the members that blocks name: layers, a head and a backbone."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 4)
        self.layers = nn.Sequential(LlamaDecoderLayer(4, 4), LlamaDecoderLayer(4, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, samples):
        return self.head(self.layers(self.backbone(samples)))


class Samples(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.full((4,), float(index))


def values():
    """Returns a dictionary from each name to the variables that a block with this name needs. Variables of a later name
    may use those of an earlier name."""
    model, data = Model(), Samples()
    loader = DataLoader(data, 4)
    strategy = {"units": {"classes": ["LlamaDecoderLayer"]}, "lr_schedule": {"type": "manual"},
                "optimizer": {"lr": 1e-3, "groups": [{"name": "head", "match": ["head.*"], "lr_ratio": 0.5}]}}
    return {
        "model": {"model": model, "Model": Model, "strategy": strategy, "value": 1.0, "tensor": torch.ones(2), "text": "yes"},
        "weights": {"weights": model.state_dict(), "loader": loader, "loss_of": lambda batch: model(batch).mean()},
        "loss": {},
        "result": {"result": types.SimpleNamespace(communication_share=0.25, data_seconds=0.01, tflops=0.1, mfu=0.5,
                                                    waited_for_rank=1, waited_for_seconds=0.002)},
        "loader": {"loader": loader},
        "loss_of": {"loss_of": lambda batch: model(batch).square().mean()},
        "data": {"data": data, "BatchSampler": BatchSampler, "DataLoader": DataLoader, "DistributedSampler": DistributedSampler},
        "engine": {"make_engine": lambda: tessera.Engine(model, strategy)},
        "resumes": {"resumes": False, "folder": "checkpoints", "epochs": 2, "batch": 4, "saves": lambda: True},
    }


def run(block):
    names = {"torch": torch, "tessera": tessera}
    known = values()
    for name in block.names:
        if name not in known:
            raise KeyError(f"no block knows the name {name}; values() has a table of them")
        names |= known[name]
    if "make_engine" in names:
        names["engine"] = names.pop("make_engine")()
    source = block.text
    if "loss" in block.names:  # the first line makes the Engine; the loss is computed after that
        first, _, source = source.partition("\n")
        exec(compile(first, block.place, "exec"), names)
        names["loss"] = names["model"](torch.ones(2, 4)).mean()
    exec(compile(source, block.place, "exec"), names)


class PythonBlocks(unittest.TestCase):
    def setUp(self):
        folder, before = tempfile.TemporaryDirectory(), os.getcwd()
        self.addCleanup(folder.cleanup)
        self.addCleanup(os.chdir, before)
        os.chdir(folder.name)
        pathlib.Path("strategy.json").write_text(json.dumps(values()["model"]["strategy"]))
        torch.save({"model": Model().state_dict(), "ema": Model().state_dict()}, "trainer.pt")

    def test_every_block_runs(self):
        here = [block for block in FOUND if block.language == "python" and not block.note.startswith(("from ", "syntax: ", "not run: "))]
        self.assertGreater(len(here), 3)
        for block in here:
            with self.subTest(block.place):
                run(block)

    def test_every_json_block_is_a_strategy_or_a_model(self):
        here = [block for block in FOUND if block.language == "json" and not block.note]
        self.assertGreater(len(here), 10)
        for block in here:
            with self.subTest(block.place):
                if "model" not in json.loads(block.text):
                    _native.Strategy.from_json(block.text, block.place)
                    continue
                pathlib.Path("model.json").write_text(block.text)
                pathlib.Path("defaults.json").write_text("{}")
                said = subprocess.run([os.environ["TESSERA_BIN"], "plan", "--model", "model.json", "--strategy", "defaults.json", "--world-size", "1"],
                                      capture_output=True, text=True, timeout=120)
                self.assertEqual(said.returncode, 0, said.stderr)

    def test_results_of_diffs_use_existing_names_and_one_strategy(self):
        here = [block for block in FOUND if block.note == "before and after"]
        self.assertGreater(len(here), 4)
        for block in here:
            strategies = 0
            tree = ast.parse(check_blocks.sides_of(block.text)[1])
            inner = {id(below) for node in ast.walk(tree) if isinstance(node, ast.Dict) for below in ast.walk(node) if below is not node}
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("tessera", "engine"):
                    owner = tessera if node.value.id == "tessera" else tessera.Engine
                    self.assertTrue(hasattr(owner, node.attr), f"{block.place}: {node.value.id} has no {node.attr}")
                if isinstance(node, ast.Dict) and id(node) not in inner:
                    _native.Strategy.from_json(json.dumps(ast.literal_eval(node)), block.place)
                    strategies += 1
                if isinstance(node, ast.Constant) and node.value == "strategy.json":
                    strategies += 1
            with self.subTest(block.place):
                self.assertEqual(strategies, 1)


if __name__ == "__main__":
    unittest.main()
