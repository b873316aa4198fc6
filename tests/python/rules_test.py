"""A Python program's own rules, and TokenBatches, do what those of C++ do."""

import sys
import tempfile
import unittest

from launched import RANKS, main, run, run_forked_files


class RulesTest(unittest.TestCase):
    def test_one_rank_and_two_train_by_own_rules_as_by_built_in_ones(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            code, output = run_forked_files(["tessera"], (1, "rules_ranks.py", one), (2, "rules_ranks.py", two))
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("rules trained like built-in ones"), 3, output)

    def test_what_a_rule_raises_ends_all_ranks_with_its_name_and_place(self):
        code, output = run([sys.executable, "-B", RANKS / "rules_endings.py"])
        self.assertEqual(code, 0, output)
        self.assertIn("all endings were right", output)


class TokensTest(unittest.TestCase):
    def test_token_batches_are_those_of_cpp_on_one_rank_and_two(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run_forked_files(["tessera"], (1, "tokens_ranks.py", folder), (2, "tokens_ranks.py", folder))
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("batches like those of C++"), 3, output)


if __name__ == "__main__":
    main()
