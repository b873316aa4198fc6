"""The Python programs of examples/ learn on two ranks. The program with the diff of docs/start-python.md learns as the plain one does on
one rank."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from launched import FOLDER, TESSERA, run

ROOT = FOLDER.parent.parent
PLAIN = ROOT / "examples" / "python" / "train_llama.py"


def losses(output):
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]


@unittest.skipUnless(importlib.util.find_spec("transformers"), "no transformers: scripts/setup --tests")
class ExamplesTest(unittest.TestCase):
    def test_example_with_the_pages_diff_learns_on_two_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            sharded, text = pathlib.Path(folder) / "train.py", pathlib.Path(folder) / "text"
            pages = sorted((ROOT / "docs" / "design").glob("*.md"))
            text.write_text("".join(page.read_text(encoding="utf-8") for page in pages)[:40000], encoding="utf-8")
            page = ROOT / "docs" / "start-python.md"
            subprocess.run([sys.executable, "-B", ROOT / "tests" / "examples" / "apply_diff.py", page, PLAIN, sharded], check=True)
            code, output = run([sys.executable, "-B", PLAIN, text])
            self.assertEqual(code, 0, output)
            wanted = losses(output)
            code, output = run([TESSERA, "launch", "-n", "2", "--", sys.executable, "-B", sharded, text])
            self.assertEqual(code, 0, output)
            got = losses(output)
            self.assertEqual(len(got), 2 * len(wanted), output)
            self.assertLess(wanted[-1], 0.7 * wanted[0])
            self.assertLess(max(got[-2:]), 0.75 * got[0])


class PolicyTest(unittest.TestCase):
    def test_a_policy_learns_on_two_ranks_as_if_each_had_a_host(self):
        program = ROOT / "examples" / "python" / "policy_gradient.py"
        code, output = run([TESSERA, "launch", "-n", "2", "--strict", "--", sys.executable, "-B", program])
        self.assertEqual(code, 0, output)
        won = [float(reward) for reward in re.findall(r"reward (-?\d+\.\d+)", output)]
        self.assertEqual(len(won), 6, output)
        self.assertGreater(won[-1], 0.7 * won[0])


class OwnRulesTest(unittest.TestCase):
    def losses_of(self, ranks, program, *arguments):
        code, output = run([TESSERA, "launch", "-n", ranks, "--", sys.executable, "-B", ROOT / "examples" / "python" / program, *arguments])
        self.assertEqual(code, 0, output)
        return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]

    def test_programs_with_rules_of_their_own_learn_on_two_ranks(self):
        for program in ("own_optimizer.py", "own_matrix_optimizer.py", "own_comm_hook.py"):
            with self.subTest(program):
                found = self.losses_of(2, program)
                self.assertEqual(len(found), 4)
                self.assertLess(found[-1], 1.0, found)  # a model that always answers 0 has a loss of 3.5

    def test_program_with_token_batches_goes_on_with_other_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text"
            text.write_text("".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "design").glob("*.md")))[:100000])
            first = self.losses_of(2, "token_batches.py", text, f"{folder}/checkpoints")
            second = self.losses_of(1, "token_batches.py", text, f"{folder}/checkpoints")
            self.assertEqual(len(first), 5)
            self.assertLess(first[-1], 0.9 * first[0], first)
            self.assertLess(max(second), 0.9 * first[0], (first, second))


if __name__ == "__main__":
    unittest.main()
