"""Tests that the Python programs of examples/ learn on two ranks. The program with the diff of docs/start-python.md
learns on one rank as the plain program does."""

import importlib.util
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

from launched import FOLDER, TESSERA, launch, run, run_forked_files

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


class SharpnessTest(unittest.TestCase):
    def test_one_rank_and_two_find_the_same_sharpness(self):
        program = ROOT / "examples" / "python" / "sharpness.py"
        code, output = run_forked_files(["tessera"], (1, program), (2, program))
        self.assertEqual(code, 0, output)
        found = [float(number) for number in re.findall(r"sharpness (-?\d+\.\d+)", output)]
        self.assertEqual(len(found), 4, output)
        self.assertGreater(min(found), 0, output)
        for one, two in zip(found[:2], found[2:], strict=True):
            self.assertAlmostEqual(one, two, delta=0.02 * one)

    def test_sharpness_of_a_quadratic_is_exact_and_leaves_all_bits(self):
        code, output = launch(2, f"""
            import sys
            sys.path.append({str(ROOT / "examples" / "python")!r})
            import tessera, torch
            from sharpness import sharpness
            model = torch.nn.Linear(6, 3, bias=False)
            engine = tessera.Engine(model, {{"units": {{"classes": ["Linear"]}}}})
            def loss():
                return engine.evaluate([torch.eye(6)], lambda x: 0.5 * model(x).square().sum()).loss
            def values():
                with engine.gathered():
                    return model.weight.detach().clone()
            before = values()
            wanted, found = 0.5 * 0.1 ** 2 * before.square().sum().item(), sharpness(engine, model.parameters(), loss)
            assert abs(found - wanted) < 1e-3 * wanted, (found, wanted)
            assert torch.equal(values(), before)
            print("exact", flush=True)
            """)
        self.assertEqual(code, 0, output)
        self.assertEqual(output.count("exact"), 2, output)


class OwnRulesTest(unittest.TestCase):
    def losses_of(self, *runs):
        """Returns the losses that all runs of (number of ranks, program, argument...) print, in the order of the
        runs."""
        folder = ROOT / "examples" / "python"
        code, output = run_forked_files(["tessera"], *((ranks, folder / program, *arguments) for ranks, program, *arguments in runs))
        self.assertEqual(code, 0, output)
        return losses(output)

    def test_programs_with_rules_of_their_own_learn_on_two_ranks(self):
        programs = ("own_optimizer.py", "own_matrix_optimizer.py", "own_comm_hook.py")
        found = self.losses_of(*((2, program) for program in programs))
        self.assertEqual(len(found), 4 * len(programs))
        for program, last in zip(programs, found[3::4], strict=True):
            with self.subTest(program):
                self.assertLess(last, 1.0, found)  # the loss of a model that always answers 0 is 3.5

    def test_program_with_token_batches_goes_on_with_other_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            text = pathlib.Path(folder) / "text"
            text.write_text("".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "design").glob("*.md")))[:100000])
            arguments = ("token_batches.py", text, f"{folder}/checkpoints")
            found = self.losses_of((2, *arguments), (1, *arguments))
            self.assertEqual(len(found), 10)
            self.assertLess(found[4], 0.9 * found[0], found)
            self.assertLess(max(found[5:]), 0.9 * found[0], found)


if __name__ == "__main__":
    unittest.main()
