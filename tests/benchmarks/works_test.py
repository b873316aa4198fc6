#!/usr/bin/env python3
"""The works: sizes as the models have them, tokens as the peers and Tessera read them."""

import pathlib
import struct
import sys
import tempfile
import unittest
import unittest.mock

import paths  # noqa: F401
import contenders
import targets
import works


EVERY_WORK = works.full_works() + works.quick_works() + [works.python_work(quick) for quick in (False, True)]


class Sizes(unittest.TestCase):
    def test_parameter_count_is_the_models(self):
        try:
            import torch
        except ImportError:
            self.skipTest("this interpreter has no torch")
        sys.path.insert(0, str(works.REPOSITORY / "tests" / "oracle"))
        from models import make_model
        for work in EVERY_WORK:
            with self.subTest(work.name), torch.device("meta"):
                self.assertEqual(work.parameters(), sum(p.numel() for p in make_model(work.model).parameters()))

    def test_timed_steps_are_warm(self):
        for work in EVERY_WORK:
            self.assertGreaterEqual(work.warm_up, 2, work.name)


class Contenders(unittest.TestCase):
    def test_private_copies_are_the_same_strategy_without_host_sharing(self):
        of = {contender.name: contender for contender in contenders.CONTENDERS}
        work = works.full_works()[1]
        private = [contender for contender in contenders.CONTENDERS if contender.private_copies]
        self.assertEqual({contender.argument for contender in private},
                         {"SHARD_OPTIMIZER", "SHARD_GRADIENTS", "SHARD_GRAD_OP", "FULL_SHARD"})
        for contender in private:
            with self.subTest(contender.name):
                shared = of[contender.name.removesuffix("_private")]
                self.assertEqual(contender.stage, shared.stage)
                self.assertNotIn("host_sharing", contenders.strategy_file(shared, work))
                self.assertEqual(contenders.strategy_file(contender, work),
                                 contenders.strategy_file(shared, work) | {"host_sharing": False})

    def test_targets_name_contenders(self):
        names = {contender.name for contender in contenders.CONTENDERS} | {"plan"}
        pairs = [pair for _, *pair, _ in targets.STEPS] + [pair for *pair, _ in targets.MEMORY]
        pairs += [pair for _, _, *pair in targets.SUMMARY]
        self.assertLessEqual({name for pair in pairs for name in pair}, names)
        names = {contender.name for contender in contenders.PYTHON_CONTENDERS}
        pairs = [pair for *pair, _ in targets.PYTHON + targets.PYTHON_MEMORY]
        self.assertLessEqual({name for pair in pairs for name in pair}, names)

    def test_one_python_model_has_the_peers_that_are_named(self):
        of = [contender.name for contender in contenders.PYTHON_CONTENDERS]
        self.assertLessEqual(set(contenders.PYTHON_PEERS), set(of))

    def test_the_package_of_a_build_is_beside_its_program(self):
        with tempfile.TemporaryDirectory() as folder:
            binary = pathlib.Path(folder).resolve() / "app/tessera"
            self.assertEqual(contenders.built_package(binary), {})
            package = binary.parents[1] / "python"
            (package / "tessera").mkdir(parents=True)
            with unittest.mock.patch.dict("os.environ", PYTHONPATH="/other"):
                self.assertEqual(contenders.built_package(binary), {"PYTHONPATH": f"{package}:/other"})


class Tokens(unittest.TestCase):
    def test_file_is_llmcs_and_the_same_every_time(self):
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder) / "a", pathlib.Path(folder) / "b"
            works.write_tokens(first, 300)
            works.write_tokens(second, 300)
            data = first.read_bytes()
            self.assertEqual(data, second.read_bytes())
            self.assertEqual(struct.unpack("<3i", data[:12]), (20240520, 1, works.TOKENS))
            tokens = struct.unpack(f"<{works.TOKENS}H", data[1024:])
            self.assertLess(max(tokens), 300)
            self.assertEqual(len(set(tokens)), 300)


if __name__ == "__main__":
    unittest.main()
