"""Tests that models of transformers, torchvision and timm train as plain PyTorch trains them. Also tests generation,
peft and deferred_init."""

import importlib.util
import os
import unittest

from launched import run_forked_files


def are_there(*packages):
    reason = f"no {', '.join(packages)}: scripts/setup --tests"
    return unittest.skipUnless(all(map(importlib.util.find_spec, packages)), reason)


@are_there("transformers", "peft")
class TransformersTest(unittest.TestCase):
    def train(self, *arguments):
        code, output = run_forked_files(["transformers", "peft"], (2, "transformers_ranks.py", *arguments), at_rest=500,
                                        TESSERA_LOG_LEVEL="error", TRANSFORMERS_OFFLINE="1")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("all architectures train like plain PyTorch"), 2, output)

    def test_sampled_architectures_train_like_plain_pytorch(self):
        self.train()

    @unittest.skipUnless(os.environ.get("TESSERA_LONG_TESTS"), "scripts/test --long")
    @are_there("torchvision", "timm")
    def test_all_architectures_train_under_every_strategy(self):
        self.train("long")


if __name__ == "__main__":
    unittest.main()
