#!/usr/bin/env python3
"""Tests percentiles, the alpha-beta fit, histograms, communication costs, memory formulas."""

import random
import threading
import unittest

import paths  # noqa: F401
import memory
import stats


class Thinned(unittest.TestCase):
    def test_thinned_samples_are_spread_over_all(self):
        self.assertEqual(stats.thinned([1, 2, 3], 3), [1, 2, 3])
        self.assertEqual(stats.thinned(list(range(10)), 4), [0, 2, 5, 7])


class Percentiles(unittest.TestCase):
    def test_interval_of_the_median_holds_it_in_95_of_100_draws(self):
        draw, held = random.Random(5), 0
        for _ in range(1000):
            low, high = stats.interval_of_median([draw.random() for _ in range(40)])
            held += low <= 0.5 <= high
        self.assertGreaterEqual(held, 930)
        self.assertLess(held, 1000)
        self.assertEqual(stats.interval_of_median([2.0]), (2.0, 2.0))

    def test_percentiles_are_exact_in_any_order(self):
        samples = list(range(1, 12))  # 1 .. 11
        random.Random(3).shuffle(samples)
        self.assertEqual(stats.summary(samples), {"n": 11, "p10": 2, "median": 6, "p90": 10})

    def test_percentile_between_samples_is_interpolated(self):
        self.assertEqual(stats.median([1.0, 2.0]), 1.5)
        self.assertAlmostEqual(stats.percentile([0.0, 10.0], 90), 9.0)

    def test_percentiles_0_and_100_are_the_extreme_samples(self):
        self.assertEqual(stats.percentile([3.0, 1.0, 2.0], 0), 1.0)
        self.assertEqual(stats.percentile([3.0, 1.0, 2.0], 100), 3.0)
        self.assertEqual(stats.summary([7.0]), {"n": 1, "p10": 7.0, "median": 7.0, "p90": 7.0})

    def test_empty_samples_and_percentiles_above_100_are_refused(self):
        with self.assertRaises(ValueError):
            stats.median([])
        with self.assertRaises(ValueError):
            stats.percentile([1.0], 101)


class AlphaBetaFit(unittest.TestCase):
    def test_fit_is_exact_on_a_line(self):
        alpha, beta = 3e-6, 1 / 10e9
        points = [(size, alpha + beta * size) for size in (4, 4096, 1 << 20, 1 << 27)]
        got = stats.alpha_beta_fit(points)
        self.assertAlmostEqual(got[0] / alpha, 1.0, places=6)
        self.assertAlmostEqual(got[1] / beta, 1.0, places=6)

    def test_small_messages_decide_alpha_although_large_ones_are_noisy(self):
        alpha, beta = 2e-6, 1 / 5e9
        points = [(size, alpha + beta * size) for size in (4, 64, 1024, 1 << 20)]
        points.append((1 << 27, (alpha + beta * 2**27) * 1.1))
        self.assertLess(abs(stats.alpha_beta_fit(points)[0] / alpha - 1), 0.05)

    def test_one_size_or_a_zero_time_is_refused(self):
        with self.assertRaises(ValueError):
            stats.alpha_beta_fit([(8, 1.0), (8, 2.0)])
        with self.assertRaises(ValueError):
            stats.alpha_beta_fit([(8, 0.0), (16, 2.0)])


class Histograms(unittest.TestCase):
    def test_every_sample_is_in_one_bin(self):
        noise = random.Random(1)
        samples = [noise.lognormvariate(-9, 1) for _ in range(1000)]
        bins = stats.log_histogram(samples)
        self.assertEqual(sum(count for _, _, count in bins), 1000)
        for (_, high, _), (low, _, _) in zip(bins, bins[1:]):
            self.assertAlmostEqual(high / low, 1.0)
        for low, high, count in bins:
            self.assertEqual(count, sum(low * (1 + 1e-12) <= sample < high * (1 + 1e-12) for sample in samples))

    def test_zero_sample_is_refused(self):
        with self.assertRaises(ValueError):
            stats.log_histogram([0.0, 1.0])


class Communication(unittest.TestCase):
    def test_exposed_fraction_and_gustafson_agree(self):
        cost = stats.communication(1.25, 1.0)
        self.assertEqual(cost, {"exposed_s": 0.25, "fraction": 0.2, "gustafson": 0.8})
        self.assertEqual(stats.communication(2.0, 2.0)["gustafson"], 1.0)


class Formulas(unittest.TestCase):
    def test_bf16_memory_equals_the_zero_papers_formulas(self):
        p, n = 1000, 4
        got = [memory.formula_bytes(stage, p, n, "bf16") for stage in range(4)]
        self.assertEqual(got, [16 * p, 4 * p + 12 * p / n, 2 * p + 14 * p / n, 16 * p / n])

    def test_fp32_has_no_second_copy(self):
        p, n = 1000, 4
        got = [memory.formula_bytes(stage, p, n, "fp32") for stage in range(4)]
        self.assertEqual(got, [16 * p, 8 * p + 8 * p / n, 4 * p + 12 * p / n, 16 * p / n])

    def test_one_rank_shards_nothing(self):
        for dtype in ("fp32", "bf16"):
            for stage in range(4):
                self.assertEqual(memory.formula_bytes(stage, 1000, 1, dtype), 16000)


class Sampling(unittest.TestCase):
    def test_peak_sees_memory_that_is_given_back(self):
        before = memory.used_bytes()
        with memory.PeakSampler() as sampler:
            block = bytearray(b"\1") * (64 << 20)
            held = memory.used_bytes()
            del block
        self.assertGreaterEqual(held - before, 60 << 20)
        self.assertGreaterEqual(sampler.peak, memory.used_bytes())

    def test_peak_is_the_largest_and_skips_what_was_not_there(self):
        values, all_seen = [1, 5, None, 3], threading.Event()

        def measure():
            if not values:
                all_seen.set()
                return 2
            return values.pop(0)

        with memory.PeakSampler(measure, seconds=0.001) as sampler:
            self.assertTrue(all_seen.wait(10))
        self.assertEqual(sampler.peak, 5)


class RatioByTurns(unittest.TestCase):
    def test_slowdown_of_both_does_not_change_the_ratio(self):
        # One contender is twice as fast each time that both are measured, although the machine became three times
        # slower in between.
        longer, shorter = [20, 20, 20, 60, 60, 60, 60, 60, 60], [10, 10, 90, 30, 30, 30, 30, 30, 30]
        self.assertEqual(stats.ratio_by_turns(longer, shorter, 3), 2.0)
        self.assertEqual(stats.ratio_by_turns(longer, shorter[:6], 3), 2.0)

    def test_fewer_samples_than_a_turn_are_refused(self):
        with self.assertRaises(ValueError):
            stats.ratio_by_turns([1.0], [1.0, 2.0], 2)


if __name__ == "__main__":
    unittest.main()
