"""Tests that a Python program's own rules, TokenBatches, ranks that do not wait for each other, and workers that come and
go do the same as those of a C++ program."""

import collections
import json
import pathlib
import sys
import tempfile
import unittest

from launched import RANKS, TESSERA, main, parameter_servers, run, run_forked_files


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


class AsynchronousTest(unittest.TestCase):
    def test_orders_backups_and_hogwild_train_like_plain_pytorch_on_one_rank_and_two(self):
        with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
            code, output = run_forked_files(["tessera"], (1, "asynchronous_ranks.py", one), (2, "asynchronous_ranks.py", two))
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("trained by orders, backups and hogwild like plain PyTorch"), 3, output)


class ReplicasTest(unittest.TestCase):
    def test_replicas_of_two_ranks_train_like_plain_pytorch(self):
        with parameter_servers(2) as servers:
            code, output = run_forked_files(["tessera"], (2, "replicas_ranks.py"), (4, "replicas_ranks.py"), **servers)
            self.assertEqual(code, 0, output)
            self.assertEqual(output.count("replicas trained like plain PyTorch"), 6, output)


class WorkersTest(unittest.TestCase):
    def test_killed_worker_begins_anew_and_each_step_is_made_once(self):
        with tempfile.TemporaryDirectory() as folder:
            code, output = run([TESSERA, "launch", "--workers", "1:2", "--servers", "1", "--max-restarts", "1", "--", sys.executable, "-B",
                                RANKS / "workers_ranks.py", folder])
            self.assertEqual(code, 0, output)
            self.assertIn("restart 1 of 1: worker 1 begins anew", output)
            self.assertEqual(output.count("this worker has written the weights"), 1, output)
            self.assertTrue((pathlib.Path(folder) / "weights.pt").exists())
            steps = [json.loads(line) for line in (pathlib.Path(folder) / "made").read_text().splitlines()]
            self.assertEqual(len(steps), 12)
            counts = collections.Counter(sample for step in steps for sample in step)
            self.assertEqual(set(counts), set(range(40)), "ten steps have all samples, and two steps are of the next epoch")
            self.assertEqual(sorted(counts.values()), [1] * 32 + [2] * 8)


if __name__ == "__main__":
    main()
