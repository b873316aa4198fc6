"""Tests that models of transformers, torchvision and timm train as plain PyTorch trains them. Also tests generation,
peft and deferred_init."""

import importlib.util
import os
import tempfile
import unittest

from launched import LONG, run_forked_files

# All of these architectures train on several ranks with the bits of one rank. Without --long, only the first three do.
WITH_DROPOUT = ["gpt2", "bert", "t5", "llama", "mistral", "qwen2", "gemma", "phi", "gpt_neox", "opt", "mixtral", "vit"]


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

    def test_dropout_on_one_to_four_ranks_gives_the_same_bits_and_a_step_of_four_is_made_again_on_one(self):
        names = WITH_DROPOUT[:None if LONG else 3]
        with tempfile.TemporaryDirectory() as folder:
            def runs(microbatches, names, *numbers):
                return [(ranks, "reproducible_ranks.py", folder, microbatches, *names) for ranks in numbers]

            replays = [(1, "reproducible_ranks.py", folder, find, names[0]) for find in ("replay", "divergence", "nonfinite")]
            code, output = run_forked_files(["transformers"], *runs(4, names, 1, 2, 4), *runs(12, names if LONG else names[:1], 1, 3),
                                            *replays, at_rest=500, TESSERA_LOG_LEVEL="error", TRANSFORMERS_OFFLINE="1")
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("all architectures have the bits of one rank"), 7 + 4, output)
        self.assertEqual(output.count("the replay found what it should find"), 3, output)


if __name__ == "__main__":
    unittest.main()
