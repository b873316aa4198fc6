"""A Python program's own rules, and TokenBatches, do what those of C++ do."""

import pathlib
import sys
import tempfile
import unittest

from launched import RANKS, launch, main, run


class RulesTest(unittest.TestCase):
    def test_one_rank_and_two_train_by_own_rules_as_by_built_in_ones(self):
        for ranks in (1, 2):
            with self.subTest(ranks), tempfile.TemporaryDirectory() as folder:
                code, output = launch(ranks, "rules_ranks.py", pathlib.Path(folder))
                self.assertEqual(code, 0, output)
                self.assertEqual(output.count("rules trained like built-in ones"), ranks, output)

    def test_what_a_rule_raises_ends_all_ranks_with_its_name_and_place(self):
        code, output = run([sys.executable, "-B", RANKS / "rules_endings.py"])
        self.assertEqual(code, 0, output)
        self.assertIn("all endings were right", output)


class TokensTest(unittest.TestCase):
    def test_token_batches_are_those_of_cpp_on_one_rank_and_two(self):
        with tempfile.TemporaryDirectory() as folder:
            for ranks in (1, 2):
                code, output = launch(ranks, "tokens_ranks.py", pathlib.Path(folder))
                self.assertEqual(code, 0, output)
                self.assertEqual(output.count("batches like those of C++"), ranks, output)


if __name__ == "__main__":
    main()
