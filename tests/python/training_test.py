"""Tests that Python models train as plain PyTorch trains them, on several ranks and under each strategy."""

import pathlib
import tempfile
import unittest

from launched import launch, main, run_forked_files


class TrainingTest(unittest.TestCase):
    def test_two_ranks_train_like_plain_pytorch(self):
        # One launch runs all programs with two ranks, so that they import torch only once.
        with tempfile.TemporaryDirectory() as folder:
            code, output = launch(2, "two_ranks.py", pathlib.Path(folder), at_rest=500)
        self.assertEqual(code, 0, output)
        for line in ("trained like plain PyTorch", "trained like torch's Adafactor", "activations lay on disk", "statistics like DDP's",
                     "a loop like plain PyTorch's"):
            self.assertEqual(output.count(line), 2, output)

    def test_three_ranks_over_gloo_train_like_plain_pytorch(self):
        code, output = run_forked_files(["tessera"], (3, "training_ranks.py", "gloo"), at_rest=500)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("trained like plain PyTorch"), 3, output)

    def test_running_statistics_have_the_bits_of_one_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            runs = [(ranks, "statistics_ranks.py", pathlib.Path(folder)) for ranks in (1, 2, 4)]
            code, output = run_forked_files(["tessera"], *runs, at_rest=500)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("statistics of one rank"), 7, output)

    def test_commits_go_on_with_other_ranks_to_the_same_bits(self):
        with tempfile.TemporaryDirectory() as folder:
            parts = [(1, 0, 4), (2, 0, 2), (1, 2, 3), (4, 3, 4)]  # ranks, and the steps that they make
            runs = [(ranks, "moved_ranks.py", pathlib.Path(folder), begin, end) for ranks, begin, end in parts]
            code, output = run_forked_files(["tessera"], *runs, at_rest=300)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("are right"), 8, output)


if __name__ == "__main__":
    main()
