#!/usr/bin/env python3
"""The models of the GPU: their sizes, and the operations that a token costs."""

import sys
import unittest

import paths  # noqa: F401
import works
from gpu.contenders import CONTENDERS
from gpu.works import flops_per_token, full_works, quick_works


class Works(unittest.TestCase):
    def test_parameter_count_is_the_models(self):
        try:
            import torch
        except ImportError:
            self.skipTest("this interpreter has no torch")
        sys.path.insert(0, str(works.REPOSITORY / "tests" / "oracle"))
        from models import make_model
        for work in full_works() + quick_works():
            with self.subTest(work.name), torch.device("meta"):
                self.assertEqual(work.parameters(), sum(p.numel() for p in make_model(work.model).parameters()))

    def test_sizes_are_those_of_their_names(self):
        wanted = {"124m": 124, "1b5": 1558, "7b": 6654}
        for work in full_works():
            self.assertAlmostEqual(work.parameters() / 1e6, wanted[work.name.split("_")[1]], delta=1)

    def test_large_models_recompute_their_blocks(self):
        for work in full_works():
            self.assertEqual(work.model["recompute"], work.parameters() > 1e9, work.name)

    def test_seven_billion_fit_a_gpu_of_139_gib_and_not_one_of_78(self):
        needs = {work.name: work.needs_bytes() / 2**30 for work in full_works()}
        self.assertTrue(120 < needs["gpt_7b"] < 139, needs)
        self.assertLess(needs["gpt_1b5"], 78)

    def test_contenders_are_known(self):
        for work in full_works() + quick_works():
            self.assertLessEqual(set(work.contenders), set(CONTENDERS), work.name)

    def test_ranks_that_share_a_gpu_share_the_batch(self):
        for work in full_works() + quick_works():
            for name in work.contenders:
                self.assertEqual(work.batch % CONTENDERS[name].ranks, 0, (work.name, name))

    def test_tokens_of_a_step_are_in_the_file(self):
        for work in full_works() + quick_works():
            self.assertLess(work.tokens(), works.TOKENS, work.name)


class Flops(unittest.TestCase):
    def test_formula_by_hand(self):
        model = {"layers": 2, "width": 3, "vocab_size": 5, "seq_len": 7}
        # Matrices: 2 layers of 12 * 9, and a head of 15: 231 parameters. Attention: 12 * 2 * 3 * 7 = 504.
        self.assertEqual(flops_per_token(model), 6 * 231 + 504)

    def test_most_of_it_is_six_for_each_parameter(self):
        for work in full_works():
            self.assertTrue(1.0 < flops_per_token(work.model) / (6 * work.parameters()) < 1.2, work.name)


if __name__ == "__main__":
    unittest.main()
