#!/usr/bin/env python3
"""Tests the study of large batches without training: the runs that it makes, the rate that it chooses, and how it fills
its page."""

import math
import unittest

import paths
import large_batch
import large_batch_text

COMMIT, MACHINE = {"hash": "0123456789abcdef", "dirty": False}, {"cpu": "a processor", "cores": 2}


def study(rows):
    return {"commit": COMMIT, "machine": MACHINE, "small": True, "size": large_batch.SMALL, "rows": rows}


def run(name, **numbers):
    return {"name": name, "loss": 0.5, "accuracy": 1.0, "held_out_loss": 0.75, "held_out_accuracy": 0.9, "noise_scale": 123.4, "s": 0.25} | numbers


def rows():
    return [{"optimizer": "SGD", "way": large_batch.PLAIN, "rate": 0.1,
             "cells": [{"batch": 32, "runs": [run("a"), run("b", held_out_accuracy=0.8)]}, {"batch": 64, "runs": [run("c", noise_scale=None)]}]},
            {"optimizer": "SGD", "way": large_batch.SCALED, "rate": 0.1,
             "cells": [{"batch": 64, "runs": [run("d", held_out_loss=math.nan)]}]}]


class Strategies(unittest.TestCase):
    def test_scaled_run_begins_at_the_rate_of_the_base_batch(self):
        for optimizer, (_, scaling, _) in large_batch.OPTIMIZERS.items():
            schedule = large_batch.digits_run(large_batch.WHOLE, optimizer, 0.1, 128, large_batch.SCALED, 1)["strategy"]["lr_schedule"]
            grown = 128 / schedule["base_batch_size"]
            factor = grown if scaling == large_batch.LINEAR else math.sqrt(grown)
            self.assertAlmostEqual(factor * schedule["warmup_from"], 1.0)
            self.assertEqual(schedule["epoch_samples"] + 360, 1797)

    def test_plain_run_is_neither_scaled_nor_warmed_up(self):
        schedule = large_batch.text_run(4096, "AdamW", 1e-3, 1024, large_batch.PLAIN, 1)["strategy"]["lr_schedule"]
        self.assertEqual(schedule, {"type": "cosine", "total_steps": 4, "min_ratio": 0.1})

    def test_runs_of_a_study_have_the_same_samples(self):
        runs = [large_batch.text_run(8192, "LAMB", 0.01, batch, large_batch.SCALED, 1) for batch in (64, 256, 1024)]
        self.assertEqual({run["steps"] * run["batch"] for run in runs}, {8192})
        self.assertEqual({run["strategy"]["lr_schedule"]["warmup_samples"] for run in runs}, {1024})
        self.assertEqual(len({run["name"] for run in runs}), 3)

    def test_runs_of_the_wire_have_the_same_samples_at_both_batches(self):
        base, large = (large_batch.wire_run(large_batch.SMALL, "plain", batch, 1e-3, 1) for batch in (large_batch.BASE, 128))
        self.assertEqual((base["steps"], large["steps"]), (68, 17))
        self.assertEqual(base["strategy"]["lr_schedule"], {"type": "cosine", "total_steps": 68, "min_ratio": 0.1})
        self.assertEqual(large["strategy"]["lr_schedule"]["warmup_samples"], 272)
        self.assertNotEqual(base["name"], large["name"])

    def test_rate_with_the_least_loss_is_chosen_and_never_one_that_diverged(self):
        self.assertEqual(large_batch.best_rate([1, 2, 3], [0.5, 0.4, math.nan]), 2)
        self.assertEqual(large_batch.best_rate([1, 2], [math.nan, 7.0]), 2)


class Outcome(unittest.TestCase):
    def test_noise_scale_is_the_quotient_of_sums_over_the_second_half(self):
        steps = [{"step": i, "loss": float(i), "noise_square": 1.0 * i, "noise_variance": 10.0, "communication_seconds": 0.5, "seconds": 2.0}
                 for i in range(1, 5)]
        steps[3]["noise_variance"] = None
        found = large_batch_text.outcome([*steps, {"eval_loss": 2.5}], steps)
        self.assertEqual(found, {"loss": 4.0, "held_out_loss": 2.5, "noise_scale": 10 / 7, "s": 0.25})


class Page(unittest.TestCase):
    def setUp(self):
        self.page = large_batch.PAGE.read_text()

    def test_page_has_a_place_for_each_table_and_nothing_else_changes(self):
        filled = large_batch.filled(self.page, {"digits": study(rows()), "text": study(rows())})
        self.assertIn("| SGD | rate of 32 | 0.1 | 85.0 ± 5.0 | 90.0 |", filled)
        self.assertIn("| SGD | scaled, warmed up | 0.1 |  | diverged |", filled)
        self.assertIn("| SGD | rate of 32 | 0.1 | 123 ± 0 | not known |", filled)
        self.assertIn("The small form", filled)
        for name in ("digits", "text", "wire"):
            self.assertEqual(filled.count(f"table: {name} -->"), 2)
        self.assertEqual(large_batch.filled(filled, {"digits": study(rows()), "text": study(rows())}), filled)
        self.assertEqual(filled.split("<!-- table: digits")[0], self.page.split("<!-- table: digits")[0])

    def test_table_of_the_wire_has_bytes_where_they_were_counted(self):
        of = [{"contender": "plain", "label": "plain", "batch": 128, "rate": 1e-3, "runs": [run("a", bytes_a_step=2.5e6)]},
              {"contender": "int8", "label": "int8", "batch": 128, "rate": 1e-3, "runs": [run("b", bytes_a_step=None)]}]
        lines = large_batch.wire_table(study(of))
        self.assertIn("| plain | 128 | 0.750 | 0.250 | 2.5 | 42.5 | 25.0 % |", lines)
        self.assertIn("| int8 | 128 | 0.750 | 0.250 | not counted | not counted | 25.0 % |", lines)

    def test_page_without_a_place_is_refused(self):
        with self.assertRaisesRegex(ValueError, "no place for the table digits"):
            large_batch.filled("# Large batches\n", {"digits": study(rows())})


if __name__ == "__main__":
    unittest.main()
