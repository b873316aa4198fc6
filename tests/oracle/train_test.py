#!/usr/bin/env python3
"""Tests the reference itself: every strategy of train.py must give the same numbers for a small model."""

import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import unittest

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import train  # noqa: E402
from exchange import read_tensors, write_tensors  # noqa: E402
from models import make_model  # noqa: E402

CONFIG = {"model": "gpt", "vocab_size": 61, "seq_len": 16, "layers": 2, "width": 32, "heads": 4}
STEPS = 5


class TrainTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        # One process does the slow imports, and all ranks are forked from this process. Optimizers import torch._dynamo
        # when they are made.
        os.environ["PYTHONPATH"] = os.pathsep.join([str(pathlib.Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
        multiprocessing.set_forkserver_preload(["train", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.device_mesh"])
        cls.folder_object = tempfile.TemporaryDirectory()
        cls.folder = pathlib.Path(cls.folder_object.name)
        torch.manual_seed(1)
        (cls.folder / "model.json").write_text(json.dumps(CONFIG))
        write_tensors(cls.folder / "init", dict(make_model(CONFIG).named_parameters()))
        tokens = (torch.randint(0, 61, (4, 8, 1)) + torch.arange(17)) % 61  # the model soon learns to count
        write_tensors(cls.folder / "batches", {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]})

    @classmethod
    def tearDownClass(cls):
        cls.folder_object.cleanup()

    def run_train(self, *arguments):
        folder = self.folder
        common = ["--init", folder / "init", "--batches", folder / "batches", "--config", folder / "model.json",
                  "--steps", STEPS, "--lr", "0.01"]
        options = train.parse_arguments([str(x) for x in (*common, *arguments)])
        return train.train(0, options) if options.strategy == "single" else train.train_ranks(options)

    def assert_same_story(self, wanted, got, tolerance):
        for key in ("losses", "grad_norms"):
            for step, (a, b) in enumerate(zip(wanted[key], got[key], strict=True)):
                self.assertLess(abs(a - b), tolerance * a, msg=f"{key} of step {step}: {a} and {b}")

    def test_exchange_returns_what_was_written(self):
        tensors = {"a": torch.randn(3, 5).t(), "b": torch.arange(4), "scalar": torch.tensor(2.5)}
        write_tensors(self.folder / "exchange", tensors)
        for name, tensor in read_tensors(self.folder / "exchange").items():
            self.assertEqual(tensor.dtype, tensors[name].dtype)
            self.assertTrue(torch.equal(tensor, tensors[name]), name)

    def test_fp32_strategies_agree(self):
        wanted = self.run_train("--clip", "0.5", "--save", self.folder / "single")
        self.assertLess(wanted["losses"][-1], wanted["losses"][0])
        self.assertTrue(all(norm > 0.5 for norm in wanted["grad_norms"]), "clipping must have had something to do")
        for strategy in ("ddp", "fsdp2", "fsdp2_no_reshard"):
            with self.subTest(strategy):
                saved = self.folder / strategy
                self.assert_same_story(
                    wanted, self.run_train("--clip", "0.5", "--strategy", strategy, "--ranks", "2", "--save", saved), 1e-4)
                for name, weight in read_tensors(self.folder / "single").items():
                    torch.testing.assert_close(read_tensors(saved)[name], weight, rtol=1e-2, atol=2e-3, msg=name)

    def test_accumulation_agrees_across_strategies(self):
        wanted = self.run_train("--accumulation", "2")
        for strategy in ("ddp", "fsdp2"):
            with self.subTest(strategy):
                self.assert_same_story(
                    wanted, self.run_train("--accumulation", "2", "--strategy", strategy, "--ranks", "2"), 1e-4)

    def test_bf16_strategies_agree_roughly_and_differ_from_fp32(self):
        fp32 = self.run_train()
        wanted = self.run_train("--dtype", "bf16")
        self.assertNotEqual(fp32["losses"], wanted["losses"])
        self.assert_same_story(fp32, wanted, 0.05)
        for strategy in ("ddp", "fsdp2"):
            with self.subTest(strategy):
                got = self.run_train("--dtype", "bf16", "--strategy", strategy, "--ranks", "2")
                self.assert_same_story(wanted, got, 0.05)

    def test_fsdp2_without_a_type_of_reductions_reduces_in_the_masters_type_since_2_15(self):
        fp32, bf16, none = (self.run_train("--dtype", "bf16", "--strategy", "fsdp2", "--ranks", "2", "--reduce", reduce)
                            for reduce in ("fp32", "bf16", "none"))
        alike, other = (fp32, bf16) if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15) else (bf16, fp32)
        self.assertEqual((none["losses"], none["grad_norms"]), (alike["losses"], alike["grad_norms"]))
        self.assertNotEqual(none["grad_norms"], other["grad_norms"])

    def test_overflow_skips_and_halves_everywhere(self):
        # A loss scale of 2^127 overflows fp32 in backward. The scale must be halved until nothing overflows, and then
        # training must continue.
        arguments = ("--loss-scale", str(2.0**127), "--growth-interval", "2")
        wanted = self.run_train(*arguments)
        self.assertTrue(wanted["skipped"][0])
        self.assertEqual(wanted["scales"][1], 2.0**126)
        for strategy in ("ddp", "fsdp2"):
            with self.subTest(strategy):
                got = self.run_train(*arguments, "--strategy", strategy, "--ranks", "2")
                self.assertEqual(wanted["skipped"], got["skipped"])
                self.assertEqual(wanted["scales"], got["scales"])


if __name__ == "__main__":
    unittest.main()
