#!/usr/bin/env python3
"""The works: sizes as the models have them, tokens as the peers and Tessera read them."""

import pathlib
import struct
import sys
import tempfile
import unittest

import paths  # noqa: F401
import works


class Sizes(unittest.TestCase):
    def test_parameter_count_is_the_models(self):
        try:
            import torch
        except ImportError:
            self.skipTest("this interpreter has no torch")
        sys.path.insert(0, str(works.REPOSITORY / "tests" / "oracle"))
        from models import make_model
        for work in works.full_works() + works.quick_works():
            with self.subTest(work.name), torch.device("meta"):
                self.assertEqual(work.parameters(), sum(p.numel() for p in make_model(work.model).parameters()))

    def test_timed_steps_are_warm(self):
        for work in works.full_works() + works.quick_works():
            self.assertGreaterEqual(work.warm_up, 2, work.name)


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
