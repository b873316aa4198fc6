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
        sizes = [work.parameters() / 1e6 for work in full_works()]
        for size, wanted in zip(sizes, (124, 1558, 6654), strict=True):
            self.assertAlmostEqual(size, wanted, delta=1)

    def test_large_models_recompute_their_blocks(self):
        self.assertEqual([work.model["recompute"] for work in full_works()], [False, True, True])

    def test_seven_billion_fit_a_gpu_of_139_gib_and_not_one_of_78(self):
        needs = full_works()[-1].needs_bytes() / 2**30
        self.assertTrue(120 < needs < 139, needs)
        self.assertLess(full_works()[1].needs_bytes() / 2**30, 78)

    def test_contenders_are_known(self):
        for work in full_works() + quick_works():
            self.assertLessEqual(set(work.contenders), set(CONTENDERS), work.name)

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
